#pragma once

/// What loads are held against: plain loops that know their best setting, and what the host's memory gives.

#include "files.hpp"

#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>

#include <memory>

namespace load_benchmark {

/// Copies of one thread out of its two buffers to the GPU.
class gpu_lane {
public:
    void wait(unsigned slot) const { done_[slot].synchronize(); }
    void send(std::byte* to, const std::byte* from, std::uint64_t bytes, unsigned slot) {
        ps::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_.get()), "cudaMemcpyAsync");
        done_[slot].record(stream_.get());
    }
    void finish() const { stream_.synchronize(); }

private:
    ps::stream stream_{0};
    ps::event done_[2];
};

struct loop_setting {
    unsigned threads;
    std::uint64_t piece;

    [[nodiscard]] std::string text() const { return std::to_string(threads) + " x " + ps::to_string(ps::bytes{piece}) + " x 2"; }
};

/// The loop to beat: threads take pieces of a file one after the other, read each into one of their two pinned buffers, and copy it from
/// there. Streams, events and memory are there before it runs.
template <class Lane = gpu_lane>
class file_loop {
public:
    /// @param bytes of the file, from its first on, that go to `to`
    /// @param pinned 4096-byte aligned, threads * piece * 2 bytes
    file_loop(const std::filesystem::path& path, int extra_flags, std::uint64_t bytes, std::byte* to, std::span<std::byte> pinned,
              loop_setting how)
        : file_(path, O_RDONLY | extra_flags),
          bytes_(std::min(bytes, file_.size())),
          to_(to),
          pinned_(pinned),
          how_(how),
          lanes_(how.threads) {}

    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

    void run() {
        std::atomic<std::uint64_t> next{0};
        on_threads(how_.threads, [&](unsigned t) {
            for (unsigned i = 0;; ++i) {
                const std::uint64_t at = next.fetch_add(how_.piece);
                if (at >= bytes_) {
                    break;
                }
                const std::uint64_t size = std::min(how_.piece, bytes_ - at);
                std::byte* slot = pinned_.data() + (t * 2 + i % 2) * how_.piece;
                lanes_[t].wait(i % 2);
                fill(slot, at, size);
                lanes_[t].send(to_ + at, slot, size, i % 2);
            }
            lanes_[t].finish();
        });
    }

private:
    /// Asks for whole pieces, which direct reads want; the last one of the file is shorter.
    void fill(std::byte* slot, std::uint64_t at, std::uint64_t size) const {
        for (std::uint64_t got = 0; got < size;) {
            const ssize_t n = ::pread(file_.number(), slot + got, how_.piece - got, static_cast<off_t>(at + got));
            if (n == 0 || (n < 0 && errno != EINTR)) {
                file_.fail("cannot be read at " + std::to_string(at + got));
            }
            got += n > 0 ? static_cast<std::uint64_t>(n) : 0;
        }
    }

    open_file file_;
    std::uint64_t bytes_;
    std::byte* to_;
    std::span<std::byte> pinned_;
    loop_setting how_;
    std::vector<Lane> lanes_;
};

/// Pinned bytes that the largest of these settings takes.
inline std::uint64_t loop_bytes(std::span<const loop_setting> settings) {
    std::uint64_t most = 0;
    for (const loop_setting& s : settings) {
        most = std::max(most, s.threads * s.piece * 2);
    }
    return most;
}

/// The setting by which `try_one(setting)` gives the most GB/s; says all of them.
template <class TryOne, class Say>
loop_setting best_of(std::span<const loop_setting> settings, TryOne&& try_one, Say&& say) {
    loop_setting best = settings[0];
    double most = 0;
    for (const loop_setting& s : settings) {
        const double rate = try_one(s);
        char text[96];
        std::snprintf(text, sizeof text, "%s: %.2f GB/s", s.text().c_str(), rate);
        say(std::string(text));
        if (rate > most) {
            most = rate;
            best = s;
        }
    }
    return best;
}

/// Reads all of it by all cores. @return a number that depends on every word, so that no read is left out
inline std::uint64_t read_everywhere(std::span<const std::byte> memory) {
    std::atomic<std::uint64_t> sum{0};
    const unsigned count = cores();
    on_threads(count, [&](unsigned i) {
        const std::size_t share = memory.size() / count / 32 * 32;
        const std::byte* at = memory.data() + i * share;
        std::uint64_t lanes[4] = {};
        for (std::size_t done = 0; done < share; done += 32) {
            std::uint64_t words[4];
            std::memcpy(words, at + done, 32);
            for (int w = 0; w < 4; ++w) {
                lanes[w] += words[w];
            }
        }
        sum += lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3];
    });
    return sum;
}

/// Copies all of it by all cores.
inline void copy_everywhere(std::span<const std::byte> from, std::byte* to) {
    const unsigned count = cores();
    on_threads(count, [&](unsigned i) {
        const std::size_t share = from.size() / count;
        std::memcpy(to + i * share, from.data() + i * share, share);
    });
}

}  // namespace load_benchmark
