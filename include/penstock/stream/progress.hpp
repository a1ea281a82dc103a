#pragma once

#include <penstock/error.hpp>

#include <cstdint>
#include <cstdio>
#include <functional>

#include <unistd.h>

namespace penstock::inline v0_1 {

/// A load was stopped through its std::stop_token, or by the destruction of its stream.
class cancelled : public error {
public:
    using error::error;
};

/// How far a load has come. GB = 1e9 bytes.
struct progress {
    std::uint64_t bytes = 0;
    std::uint64_t total = 0;
    double seconds = 0;  ///< since the start

    [[nodiscard]] double gb_per_s() const noexcept { return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0; }

    /// At the average rate so far; 0 before the first byte.
    [[nodiscard]] double remaining_seconds() const noexcept {
        return bytes == 0 ? 0 : seconds * static_cast<double>(total - bytes) / static_cast<double>(bytes);
    }
};

/// Called by one thread at a time with growing `bytes`; the last call of a load that succeeds has bytes == total. An exception it throws
/// ends the load and reaches whoever waits for it.
using progress_callback = std::function<void(const progress&)>;

/// One line on standard error, redrawn at most ten times a second; silent where standard error is no terminal.
class progress_bar {
public:
    void operator()(const progress& now) {
        if (isatty(STDERR_FILENO) == 0) {
            return;
        }
        const bool last = now.bytes == now.total;
        if (!last && now.seconds < next_draw_) {
            return;
        }
        next_draw_ = now.seconds + 0.1;
        constexpr int width = 30;
        const double part = now.total == 0 ? 1.0 : static_cast<double>(now.bytes) / static_cast<double>(now.total);
        const int full = static_cast<int>(part * width);
        std::fprintf(stderr, "\r[%.*s%*s] %3.0f %%  %.2f of %.2f GB  %.1f GB/s  %.0f s left \x1b[K%s", full,
                     "##############################", width - full, "", part * 100, static_cast<double>(now.bytes) / 1e9,
                     static_cast<double>(now.total) / 1e9, now.gb_per_s(), now.remaining_seconds(), last ? "\n" : "");
        std::fflush(stderr);
    }

private:
    double next_draw_ = 0;
};

}  // namespace penstock::inline v0_1
