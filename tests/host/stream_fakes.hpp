#pragma once

#include "../known_bytes.hpp"

#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

/// What the tests of weight streams share: files and a slow source of known bytes, and a copy engine in slow motion.

namespace stream_fakes {

using namespace penstock;
using namespace penstock::literals;
using namespace std::chrono_literals;

using tests::pattern;
using tests::temporary_directory;
using tests::write_pattern;

/// Bytes by formula. Reads take `delay`, or as long as the test holds them back; which file was read when is remembered.
class slow_source final : public byte_source {
public:
    explicit slow_source(std::chrono::microseconds delay = 0us) : delay_(delay) {}

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        std::unique_lock lock(mutex_);
        order_.push_back(file);
        const std::size_t number = order_.size();
        most_at_once_ = std::max(most_at_once_, ++now_);
        changed_.notify_all();
        changed_.wait(lock, [&] { return number <= allowed_; });
        changed_.wait_for(lock, 10s, [&] { return most_at_once_ >= company_; });
        lock.unlock();
        if (delay_ > 0us) {
            std::this_thread::sleep_for(delay_);
        }
        tests::fill(into, file, offset);
        lock.lock();
        --now_;
        if (file == broken_file) {
            throw io_error("file number " + std::to_string(file) + ": broken at offset " + std::to_string(offset));
        }
    }

    [[nodiscard]] std::string name(std::uint32_t file) const override { return "number " + std::to_string(file); }
    [[nodiscard]] std::uint32_t reads_at_a_time(std::uint32_t) const noexcept override { return at_a_time; }

    /// Lets the first `reads` reads pass and holds back the others.
    void allow(std::size_t reads) {
        const std::lock_guard lock(mutex_);
        allowed_ = reads;
        changed_.notify_all();
    }

    /// Holds back every read until `readers` of them have been there at once.
    void want_company(int readers) { company_ = readers; }

    void wait_for_reads(std::size_t reads) {
        std::unique_lock lock(mutex_);
        REQUIRE(changed_.wait_for(lock, 10s, [&] { return order_.size() >= reads; }));
    }

    [[nodiscard]] std::vector<std::uint32_t> reads() const {
        const std::lock_guard lock(mutex_);
        return order_;
    }

    [[nodiscard]] int most_at_once() const {
        const std::lock_guard lock(mutex_);
        return most_at_once_;
    }

    std::uint32_t broken_file = ~0u;
    std::uint32_t at_a_time = ~0u;

private:
    const std::chrono::microseconds delay_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::uint32_t> order_;
    std::size_t allowed_ = ~std::size_t{0};
    int company_ = 0;
    int most_at_once_ = 0;
    int now_ = 0;
};

inline transfer from_file(std::uint64_t request, std::uint32_t file, std::uint64_t offset, std::span<std::byte> to,
                          urgency level = urgency::on_demand) {
    transfer t;
    t.request = request;
    t.file = file;
    t.offset = offset;
    t.bytes = to.size();
    t.destination = to.data();
    t.level = level;
    return t;
}

constexpr std::byte guard{0xA5};

/// A copy engine in slow motion: copies of one stream run one after another in a thread of its own, each after a while, or when the test
/// lets them.
class slow_copies {
public:
    slow_copies() : thread_([this](std::stop_token stop) { run(stop); }) {}

    std::uint64_t enqueue(std::byte* to, const std::byte* from, std::uint64_t size) {
        const std::lock_guard lock(mutex_);
        queue_.push_back({to, from, size});
        targets_.push_back(to);
        changed_.notify_all();
        ++enqueued_;
        most_at_once_ = std::max(most_at_once_, enqueued_ - done_);
        return enqueued_;
    }
    void wait(std::uint64_t number) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return done_ >= number; });
    }
    std::uint64_t enqueued() {
        const std::lock_guard lock(mutex_);
        return enqueued_;
    }

    std::uint64_t done() {
        const std::lock_guard lock(mutex_);
        return done_;
    }

    /// Lets the first `copies` run and holds back the others.
    void allow(std::uint64_t copies) {
        const std::lock_guard lock(mutex_);
        allowed_ = copies;
        changed_.notify_all();
    }
    void wait_for_enqueued(std::uint64_t copies) {
        std::unique_lock lock(mutex_);
        REQUIRE(changed_.wait_for(lock, 10s, [&] { return enqueued_ >= copies; }));
    }
    std::uint64_t most_at_once() {
        const std::lock_guard lock(mutex_);
        return most_at_once_;
    }
    /// Where the copies went, in the order in which they were enqueued.
    std::vector<std::byte*> targets() {
        const std::lock_guard lock(mutex_);
        return targets_;
    }

private:
    struct copy {
        std::byte* to;
        const std::byte* from;
        std::uint64_t size;
    };
    void run(std::stop_token stop) {
        std::unique_lock lock(mutex_);
        while (changed_.wait(lock, stop, [&] { return !queue_.empty() && done_ < allowed_; })) {
            const copy next = queue_.front();
            queue_.pop_front();
            lock.unlock();
            std::this_thread::sleep_for(200us);
            std::copy_n(next.from, next.size, next.to);
            lock.lock();
            ++done_;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::deque<copy> queue_;
    std::vector<std::byte*> targets_;
    std::uint64_t allowed_ = ~std::uint64_t{0};
    std::uint64_t enqueued_ = 0;
    std::uint64_t done_ = 0;
    std::uint64_t most_at_once_ = 0;
    std::jthread thread_;
};

struct slow_link {
    struct guard {
        explicit guard(int) {}
        ~guard() {}
    };
    class marker {
    public:
        explicit marker(waiting) {}
        void record(cudaStream_t stream) {
            copies_ = reinterpret_cast<slow_copies*>(stream);
            number_ = copies_->enqueued();
        }
        void synchronize() const {
            if (copies_ != nullptr) {
                copies_->wait(number_);
            }
        }
        void synchronize_quietly() const noexcept { synchronize(); }
        [[nodiscard]] bool over() const noexcept { return copies_ == nullptr || copies_->done() >= number_; }

    private:
        slow_copies* copies_ = nullptr;
        std::uint64_t number_ = 0;
    };
    static void copy(const place& where, std::byte* to, const std::byte* from, std::uint64_t size) {
        reinterpret_cast<slow_copies*>(where.stream)->enqueue(to, from, size);
    }
    static void finish(const place& where) {
        auto* copies = reinterpret_cast<slow_copies*>(where.stream);
        copies->wait(copies->enqueued());
    }
};

/// Pageable memory that says it can be copied from asynchronously, as pinned memory can.
struct as_if_pinned : memory::pageable {
    static constexpr bool device_accessible = true;
};

}  // namespace stream_fakes
