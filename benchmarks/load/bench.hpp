#pragma once

/// What all groups of rows share: settings, table, files, the link, and the loads that are timed.

#include "baselines.hpp"
#include "models.hpp"
#include "report.hpp"

#include <penstock/buffer/arena.hpp>
#include <penstock/buffer/buffer.hpp>
#include <penstock/penstock.hpp>

#include <memory>
#include <optional>

namespace load_benchmark {

using device_memory = ps::buffer<std::byte, ps::memory::device>;

struct settings {
    std::uint64_t bytes = 8_GiB;
    int rounds = 15;
    std::filesystem::path json{};
    std::filesystem::path folder = std::filesystem::temp_directory_path();
    std::vector<std::string> only{};

    [[nodiscard]] bool wanted(const std::string& group) const {
        return only.empty() || std::ranges::any_of(only, [&](const std::string& part) { return group.find(part) != std::string::npos; });
    }
};

/// One pinned copy of 1 GiB to GPU 0: what everything else is a share of. A row of every group.
class link_copy {
public:
    link_copy() : from_(1_GiB, {.device = 0}), to_(1_GiB) {
        if (!from_.pinned()) {
            throw ps::out_of_memory("1 GiB of pinned memory cannot be had: " + from_.how());
        }
        fill_random_everywhere(from_.bytes());
    }

    [[nodiscard]] candidate row() {
        return {"link: one pinned copy of 1 GiB", from_.size(), [this] { copy(from_.data()); }};
    }
    [[nodiscard]] std::span<const std::byte> memory() const noexcept { return from_.bytes(); }

    void copy(const std::byte* from) {
        ps::check(cudaMemcpyAsync(to_.data(), from, to_.size(), cudaMemcpyHostToDevice, stream_.get()), "cudaMemcpyAsync");
        stream_.synchronize();
    }

private:
    ps::arena from_;
    device_memory to_;
    ps::stream stream_{0};
};

struct bench {
    explicit bench(settings chosen) : how(std::move(chosen)), files(how.folder, how.bytes) {}

    settings how;
    report out;
    model_files files;
    ps::stream stream{0};
    ps::place device = ps::on_device(0, stream.get());

    /// Made when it is first wanted: the rows before that run without its memory.
    link_copy& link() { return link_ ? *link_ : link_.emplace(); }

private:
    std::optional<link_copy> link_;
};

/// Overwrites memory of a device, so that what is found there later came later.
inline void spoil(int device, std::byte* memory, std::uint64_t bytes) {
    const ps::device_guard on(device);
    ps::check(cudaMemset(memory, 0xa5, bytes), "cudaMemset");
    ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/// Bytes at a destination, brought back to the host.
inline void bring_back(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    ps::check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

/// How many of `samples` ranges, spread over all transfers, their first and last bytes among them, do not hold what was sent there. What is
/// mostly zeros counts as wrong: a hole in a file proves nothing.
inline std::size_t wrong_ranges(std::span<const ps::transfer> transfers, const std::vector<std::filesystem::path>& paths,
                                std::size_t samples, void (*fetch)(std::byte*, const std::byte*, std::uint64_t) = bring_back) {
    ps::file_source files(paths);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < samples; ++i) {
        const ps::transfer& t = transfers[i * (transfers.size() - 1) / (samples - 1)];
        const std::uint64_t size = std::min<std::uint64_t>(t.bytes, 64_KiB);
        const double part = i == 0 ? 0 : i + 1 == samples ? 1 : std::fmod(static_cast<double>(i) * 0.6180339887, 1.0);
        const auto at = static_cast<std::uint64_t>(part * static_cast<double>(t.bytes - size));
        std::vector<std::byte> sent(size), there(size);
        if (t.memory != nullptr) {
            std::copy_n(t.memory + at, size, sent.begin());
        } else {
            files.read(t.file, t.offset + at, sent);
        }
        fetch(there.data(), t.destination + at, size);
        const auto zeros = static_cast<std::uint64_t>(std::ranges::count(sent, std::byte{0}));
        wrong += sent != there || zeros > size / 2;
    }
    return wrong;
}

inline constexpr std::size_t ranges_looked_at = 128;

/// The same of a loop that brings the first bytes of a file.
inline std::size_t wrong_of(file_loop<>& loop, const std::filesystem::path& path, std::byte* to) {
    spoil(0, to, loop.bytes());
    loop.run();
    ps::transfer all;
    all.bytes = loop.bytes();
    all.destination = to;
    return wrong_ranges(std::span(&all, 1), {path}, ranges_looked_at);
}

/// A load of tensors through the library, timed from the call on an open source to the arrival of the last byte. Its memory on the device
/// is there before.
class tensor_load {
public:
    using open_source = std::function<std::unique_ptr<ps::byte_source>()>;

    /// @param anew whether every load has a source of its own
    tensor_load(ps::weight_stream<>& loader, const ps::tensor_list& list, ps::place where, open_source open, bool anew = false)
        : loader_(loader), list_(list), where_(where), open_(std::move(open)), anew_(anew) {}

    [[nodiscard]] std::uint64_t bytes() const { return data_bytes(list_); }
    [[nodiscard]] std::string source() const { return done_->report().source; }
    [[nodiscard]] candidate row(const std::string& name) {
        return {name, bytes(), [this] { move(); }, [this] { prepare(); }};
    }

    /// Memory that holds other bytes, and a source.
    void prepare() {
        if (anew_) {
            source_.reset();
        }
        if (!source_) {
            source_ = open_();
        }
        if (done_) {
            room_ = std::move(done_);  // memory that is freed is scrubbed by the driver, which would slow down the load beside it
            done_.reset();
        } else if (!room_) {
            room_.emplace(list_, where_);
        }
        std::byte* begin = room_->begin()->second.data;
        for (const auto& [name, tensor] : *room_) {
            begin = std::min(begin, tensor.data);
        }
        spoil(where_.device, begin, room_->bytes());
    }

    void move() { done_.emplace(loader_.load(list_, std::move(*room_), *source_)); }

    /// Loads once more and compares. @return how many ranges are wrong
    [[nodiscard]] std::size_t wrong() {
        prepare();
        move();
        std::vector<ps::transfer> sent;
        for (const ps::tensor_info& t : list_.tensors) {
            ps::transfer& one = sent.emplace_back();
            one.file = t.file;
            one.offset = t.offset;
            one.bytes = t.bytes;
            one.destination = (*done_)[t.name].data;
        }
        return wrong_ranges(sent, list_.files, ranges_looked_at);
    }

private:
    ps::weight_stream<>& loader_;
    const ps::tensor_list& list_;
    ps::place where_;
    open_source open_;
    bool anew_;
    std::unique_ptr<ps::byte_source> source_;
    std::optional<ps::loaded_tensors> room_, done_;
};

inline tensor_load::open_source chosen(const ps::tensor_list& list) {
    return [&list] { return std::make_unique<ps::chosen_source>(list.files); };
}

}  // namespace load_benchmark
