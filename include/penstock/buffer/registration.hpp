#pragma once

#include <penstock/policy/memory.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace penstock::inline v0_1 {

/// What the device may do with host memory that is registered.
enum class access : bool { read_write, read_only };

/// Page-locks host memory that exists already (an engine's buffer, a file mapping) for as long as this object lives, so that copies from it
/// are asynchronous and kernels read it in place. Where the driver refuses, it steps down and says so: read-only, then plain, then not
/// pinned at all (`pinned()` is false; copies from the memory are still right, only slower). Zero bytes are legal. Move-only.
/// @pre the memory outlives this object and is not registered by anyone else.
class registration {
public:
    registration() = default;

    explicit registration(std::span<std::byte> memory) : registration(memory.data(), memory.size(), access::read_write) {}

    /// For a read-only mapping: PROT_READ, private or shared.
    explicit registration(std::span<const std::byte> memory)
        : registration(const_cast<std::byte*>(memory.data()), memory.size(), access::read_only) {}

    registration(registration&& other) noexcept { swap(other); }
    registration& operator=(registration&& other) noexcept {
        registration taken(std::move(other));
        swap(taken);
        return *this;
    }

    ~registration() {
        if (locked_ && detail::cuda_usable() && cudaHostUnregister(memory_) != cudaSuccess && detail::cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
    }

    [[nodiscard]] bool pinned() const noexcept { return locked_; }
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {memory_, size_}; }

    /// "registered, read-only", "registered", or "pageable (the reason)"; "empty" for zero bytes.
    [[nodiscard]] const std::string& how() const noexcept { return how_; }

private:
    registration(std::byte* memory, std::size_t size, access wanted) : memory_(memory), size_(size) {
        if (size == 0) {
            return;
        }
        if (device_count() == 0) {
            how_ = "pageable (no CUDA device)";
            return;
        }
        constexpr unsigned everywhere = cudaHostRegisterPortable | cudaHostRegisterMapped;
        if (wanted == access::read_only && lock(everywhere | cudaHostRegisterReadOnly)) {
            how_ = "registered, read-only";
        } else if (lock(everywhere)) {
            how_ = "registered";
        }
    }

    bool lock(unsigned flags) {
        const cudaError_t code = cudaHostRegister(memory_, size_, flags);
        if (code == cudaSuccess) {
            locked_ = true;
            return true;
        }
        static_cast<void>(cudaGetLastError());
        if (detail::loses_device(code)) {
            check(code, "cudaHostRegister");
        }
        how_ = std::string("pageable (cudaHostRegister: ") + cudaGetErrorString(code) + ")";
        return false;
    }

    void swap(registration& other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(size_, other.size_);
        std::swap(locked_, other.locked_);
        std::swap(how_, other.how_);
    }

    std::byte* memory_ = nullptr;
    std::size_t size_ = 0;
    bool locked_ = false;
    std::string how_ = "empty";
};

}  // namespace penstock::inline v0_1
