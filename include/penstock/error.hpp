#pragma once

#include <penstock/config.hpp>

#include <cuda/std/source_location>

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace penstock::inline v0_1 {

/// Base of all exceptions of the library. The message names the file, tensor or expert, what was wanted and what was found.
class error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The bytes of a file do not follow their format.
class format_error : public error {
public:
    using error::error;
};

/// The operating system refused or cut short an operation on a file.
class io_error : public error {
public:
    using error::error;
};

/// A choice that cannot work: a budget below the minimum, a shape or policy that the called part does not serve.
class configuration_error : public error {
public:
    using error::error;
};

/// Memory of the named kind ran out. Everything taken by the failed call has been given back.
class out_of_memory : public error {
public:
    using error::error;
};

/// The CUDA runtime reported an error.
class cuda_error : public error {
public:
    cuda_error(cudaError_t code, const std::string& text) : error(text), code_(code) {}

    [[nodiscard]] cudaError_t code() const noexcept { return code_; }

private:
    cudaError_t code_;
};

/// The context is gone (illegal address, ECC error, device fallen off the bus): destructors leave CUDA alone after it.
class device_lost : public cuda_error {
public:
    using cuda_error::cuda_error;
};

namespace detail {

[[nodiscard]] constexpr bool loses_device(cudaError_t code) noexcept {
    return code == cudaErrorIllegalAddress || code == cudaErrorECCUncorrectable || code == cudaErrorHardwareStackError ||
           code == cudaErrorIllegalInstruction || code == cudaErrorMisalignedAddress || code == cudaErrorInvalidAddressSpace ||
           code == cudaErrorInvalidPc || code == cudaErrorLaunchFailure || code == cudaErrorNvlinkUncorrectable;
}

[[noreturn]] inline void throw_cuda(cudaError_t code, const char* what, const cuda::std::source_location& where) {
    static_cast<void>(cudaGetLastError());  // the next call of the user must not see our error
    std::string text = std::string("penstock: ") + what + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ") at " +
                       where.file_name() + ":" + std::to_string(where.line());
    if (code == cudaErrorMemoryAllocation) {
        throw out_of_memory(text);
    }
    if (loses_device(code)) {
        throw device_lost(code, text);
    }
    throw cuda_error(code, text);
}

}  // namespace detail

/// Throws `cuda_error` (or `out_of_memory`, `device_lost`) unless `code` is success; clears the runtime's last error first.
inline void check(cudaError_t code, const char* what, const cuda::std::source_location& where = cuda::std::source_location::current()) {
    if (code != cudaSuccess) {
        detail::throw_cuda(code, what, where);
    }
}

}  // namespace penstock::inline v0_1
