#pragma once

#include <penstock/policy/memory.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace penstock::inline v0_1 {

/// What the device may do with host memory that is registered.
enum class access : bool { read_write, read_only };

namespace detail {

/// The calls that lock host memory which exists already; a test puts its own in their place.
struct cuda_locking {
    static bool available() noexcept { return device_count() > 0; }
    static cudaError_t lock(void* p, std::size_t size, unsigned flags) noexcept {
        const cudaError_t code = cudaHostRegister(p, size, flags);
        if (code != cudaSuccess && cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
        return code;
    }
    static void unlock(void* p) noexcept {
        if (cuda_usable() && cudaHostUnregister(p) != cudaSuccess && cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
    }
};

}  // namespace detail

/// Page-locks host memory that exists already (an engine's buffer, a file mapping) for as long as this object lives, so that copies from it
/// are asynchronous and kernels read it in place. Where the driver refuses, it steps down and says so: read-only, then plain, then not
/// pinned at all (`pinned()` is false; copies from the memory are still right, only slower). Zero bytes are legal. Move-only.
/// @pre the memory outlives this object and is not registered by anyone else.
/// @tparam Locking the calls that lock, of the runtime or of a test
template <class Locking>
class basic_registration {
public:
    basic_registration() = default;

    explicit basic_registration(std::span<std::byte> memory, Locking locking = {})
        : basic_registration(memory.data(), memory.size(), access::read_write, std::move(locking)) {}

    /// For a read-only mapping (PROT_READ) of a file. Map it shared: to lock a private one, newer kernels copy every page first.
    explicit basic_registration(std::span<const std::byte> memory, Locking locking = {})
        : basic_registration(const_cast<std::byte*>(memory.data()), memory.size(), access::read_only, std::move(locking)) {}

    basic_registration(basic_registration&& other) noexcept { swap(other); }
    basic_registration& operator=(basic_registration&& other) noexcept {
        basic_registration taken(std::move(other));
        swap(taken);
        return *this;
    }

    ~basic_registration() {
        if (locked_) {
            locking_.unlock(memory_);
        }
    }

    [[nodiscard]] bool pinned() const noexcept { return locked_; }
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {memory_, size_}; }

    /// "registered, read-only", "registered", or "pageable (the reason)"; "empty" for zero bytes.
    [[nodiscard]] const std::string& how() const noexcept { return how_; }

private:
    basic_registration(std::byte* memory, std::size_t size, access wanted, Locking locking)
        : locking_(std::move(locking)), memory_(memory), size_(size) {
        if (size == 0) {
            return;
        }
        if (!locking_.available()) {
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
        const cudaError_t code = locking_.lock(memory_, size_, flags);
        if (code == cudaSuccess) {
            locked_ = true;
            return true;
        }
        if (detail::loses_device(code)) {
            check(code, "cudaHostRegister");
        }
        how_ = std::string("pageable (cudaHostRegister: ") + cudaGetErrorString(code) + ")";
        return false;
    }

    void swap(basic_registration& other) noexcept {
        std::swap(locking_, other.locking_);
        std::swap(memory_, other.memory_);
        std::swap(size_, other.size_);
        std::swap(locked_, other.locked_);
        std::swap(how_, other.how_);
    }

    Locking locking_{};
    std::byte* memory_ = nullptr;
    std::size_t size_ = 0;
    bool locked_ = false;
    std::string how_ = "empty";
};

using registration = basic_registration<detail::cuda_locking>;

}  // namespace penstock::inline v0_1
