#pragma once

/// What the situations of benchmark_contention share: the table, experts in pinned memory, prefetching without end, waits of an urgent expert.

#include "../load/measure.hpp"

#include <penstock/buffer/arena.hpp>
#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace contention_benchmark {

namespace ps = penstock;
using namespace ps::literals;
using load_benchmark::median;
using load_benchmark::seconds_of;
using clock_type = std::chrono::steady_clock;

inline constexpr std::uint64_t expert_bytes = 42_MiB;
inline constexpr std::uint32_t experts = 25;
inline constexpr ps::bytes whole{expert_bytes};
inline const std::vector<ps::bytes> chunk_sizes{whole, 8_MiB, 4_MiB, 2_MiB, 1_MiB};

inline std::string name(ps::bytes chunk) { return chunk == whole ? "whole" : ps::to_string(chunk); }

inline double microseconds_since(clock_type::time_point from) {
    return std::chrono::duration<double, std::micro>(clock_type::now() - from).count();
}

inline double percentile(std::vector<double> values, double part) {
    std::ranges::sort(values);
    return values.empty() ? 0 : values[std::min(values.size() - 1, static_cast<std::size_t>(part * static_cast<double>(values.size())))];
}

/// Rows of figures, printed as they come, and their JSON.
class table {
public:
    void fact(const std::string& what, const std::string& value) {
        std::printf("%-14s %s\n", what.c_str(), value.c_str());
        all_["facts"][what] = value;
    }
    void group(const std::string& title) {
        std::printf("\n%s\n", title.c_str());
        group_ = title.substr(0, title.find(':'));
    }
    /// @param must what the figure is held to; 0: nothing @param at_most or at least
    void row(const std::string& what, std::vector<std::pair<std::string, double>> figures, const std::string& held = {}, double must = 0,
             bool at_most = true) {
        std::printf("%-34s", what.c_str());
        nlohmann::json row{{"group", group_}, {"what", what}};
        double value = 0;
        for (const auto& [label, figure] : figures) {
            std::printf("  %s %9.4g", label.c_str(), figure);
            row[label] = figure;
            value = label == held ? figure : value;
        }
        if (!held.empty()) {
            const bool met = at_most ? value <= must : value >= must;
            std::printf("  [%s %s %.4g: %s]", held.c_str(), at_most ? "<=" : ">=", must, met ? "met" : "MISSED");
            row["must"] = {{"figure", held}, {at_most ? "at_most" : "at_least", must}, {"met", met}};
        }
        std::printf("\n");
        std::fflush(stdout);
        all_["rows"].push_back(std::move(row));
    }
    /// Kept to a tenth of a microsecond.
    void samples(const std::string& what, const std::vector<double>& values) {
        nlohmann::json& kept = all_["samples"][group_ + ": " + what];
        for (const double v : values) {
            kept.push_back(std::round(v * 10) / 10);
        }
    }
    void write(const std::string& path) const { std::ofstream(path) << all_.dump() << '\n'; }

private:
    std::string group_;
    nlohmann::json all_ = nlohmann::json::object();
};

/// Nothing is read: all bytes are in memory.
struct no_files final : ps::byte_source {
    void read(std::uint32_t, std::uint64_t, std::span<std::byte>) override {}
    [[nodiscard]] std::string name(std::uint32_t) const override { return "nothing"; }
};

/// Experts in pinned memory and room for them on the device.
struct bench {
    ps::arena from{experts * expert_bytes, {.device = 0}};
    ps::buffer<std::byte, ps::memory::device> to{experts * expert_bytes};
    no_files nothing;
    table out;
    std::uint32_t samples = 1000;
    double link = 0;  ///< bytes a microsecond: one large copy

    ps::transfer expert(std::uint32_t n, ps::urgency level, std::uint64_t request = 0) const {
        ps::transfer t;
        t.request = request;
        t.memory = from.data() + n * expert_bytes;
        t.memory_is_pinned = from.pinned();
        t.bytes = expert_bytes;
        t.destination = const_cast<std::byte*>(to.data()) + n * expert_bytes;
        t.level = level;
        return t;
    }
    std::vector<ps::transfer> all(ps::urgency level) const {
        std::vector<ps::transfer> list;
        for (std::uint32_t n = 0; n + 1 < experts; ++n) {  // the last one is the urgent one's
            list.push_back(expert(n, level, n));
        }
        return list;
    }
};

template <class Scheduler>
using stream_of = ps::weight_stream<Scheduler, ps::chunking::run_time>;

/// Until all that is enqueued on the stream has arrived.
inline void arrive(const ps::stream& s, ps::event& e) {
    e.record(s.get());
    while (!e.ready()) {
    }
}

/// Prefetching without end, until it dies.
template <class Stream>
class saturation {
public:
    saturation(bench& b, Stream& loader) : b_(b), loader_(loader), thread_([this](std::stop_token stop) { run(stop); }) {}

    /// Of loads that have ended, and of the running ones what has been enqueued.
    std::uint64_t bytes() {
        const std::lock_guard lock(mutex_);
        return ended_ + first_.report().bytes + second_.report().bytes;
    }

private:
    void run(std::stop_token stop) {
        const std::vector<ps::transfer> list = b_.all(ps::urgency::prefetch);
        const auto more = [&] { return loader_.start(list, b_.nothing, ps::on_device(0, way_.get()), {}, stop); };
        {
            const std::lock_guard lock(mutex_);
            first_ = more();
            second_ = more();
        }
        begun = true;
        while (!stop.stop_requested()) {
            try {
                first_.wait();
            } catch (const ps::cancelled&) {
                break;
            }
            const std::lock_guard lock(mutex_);
            ended_ += first_.report().bytes;
            first_ = std::move(second_);
            second_ = more();
        }
    }

    bench& b_;
    Stream& loader_;
    ps::stream way_{0};
    std::mutex mutex_;
    ps::ticket first_, second_;
    std::uint64_t ended_ = 0;

public:
    std::atomic<bool> begun{false};

private:
    std::jthread thread_;
};

/// Waits of an urgent expert, the requests a random while apart.
template <class Stream>
std::vector<double> urgent_waits(bench& b, Stream& loader, std::uint32_t samples, double apart_us) {
    const ps::stream way(0);
    ps::event end;
    std::mt19937 random(7);
    std::vector<double> waits;
    for (std::uint32_t i = 0; i < samples; ++i) {
        const auto idle_until = clock_type::now() + std::chrono::microseconds(random() % static_cast<unsigned>(2 * apart_us + 1));
        while (clock_type::now() < idle_until) {
        }
        const ps::transfer t = b.expert(experts - 1, ps::urgency::on_demand, 1000);
        const auto begin = clock_type::now();
        ps::ticket load = loader.start(std::span(&t, 1), b.nothing, ps::on_device(0, way.get()));
        load.wait();
        arrive(way, end);
        waits.push_back(microseconds_since(begin));
    }
    return waits;
}

}  // namespace contention_benchmark
