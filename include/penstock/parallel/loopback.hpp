#pragma once

#include <penstock/parallel/host_rows.hpp>
#include <penstock/parallel/transport.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {
namespace transport {

/// Ranks are threads of one process, and their blocks lie in host memory: for tests without a GPU and for large worlds.
///
/// A send copies the bytes into memory of the world and waits for nobody; a receive waits until something has come from every rank. So a
/// rank runs ahead of the others by one exchange at most, and none waits at a barrier. An endpoint that is destroyed counts as a rank that
/// has gone: those that still wait for it are told at once, those that have all they need go on.
class loopback {
public:
    static constexpr bool on_device = false;
    using memory = penstock::memory::pageable;
    using row_steps = host_rows;

    /// The endpoints of a new world, one a rank. Each may be moved to the thread that uses it; several worlds do not touch each other.
    /// @param time_limit for one wait. @throws configuration_error for no ranks
    [[nodiscard]] static std::vector<loopback> world(std::uint32_t ranks, std::chrono::milliseconds time_limit = std::chrono::seconds(30)) {
        if (ranks == 0) {
            throw configuration_error("penstock: a loopback world of 0 ranks was asked for");
        }
        const auto shared = std::make_shared<shared_state>(ranks, time_limit);
        std::vector<loopback> endpoints;
        endpoints.reserve(ranks);
        for (std::uint32_t r = 0; r < ranks; ++r) {
            endpoints.push_back(loopback(shared, r));
        }
        return endpoints;
    }

    loopback(loopback&&) noexcept = default;
    loopback& operator=(loopback&& other) noexcept {
        loopback taken(std::move(other));
        std::swap(world_, taken.world_);
        std::swap(rank_, taken.rank_);
        std::swap(receives_, taken.receives_);
        return *this;
    }
    ~loopback() {
        if (world_ != nullptr) {
            world_->left[rank_].store(true);
            world_->wake_all();
        }
    }

    [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }
    [[nodiscard]] std::uint32_t ranks() const noexcept { return world_->ranks; }

    /// Bytes that were sent and not yet received, over the whole world.
    [[nodiscard]] std::uint64_t bytes_under_way() const noexcept { return world_->under_way.load(); }

    void exchange_counts(std::span<const std::uint32_t> to, std::span<std::uint32_t> from) {
        for (std::uint32_t d = 0; d < ranks(); ++d) {
            const send_block one{d, reinterpret_cast<const std::byte*>(&to[d]), sizeof to[d]};
            post(d, {&one, 1});
        }
        const std::vector<message> messages = wait_for_all();
        for (std::uint32_t s = 0; s < ranks(); ++s) {
            require_size(s, messages[s].size(), sizeof from[s]);
            std::memcpy(&from[s], messages[s].data(), sizeof from[s]);
        }
    }

    void begin_exchange(std::span<const send_block> sends, std::span<const receive_block> receives) {
        receives_.assign(receives.begin(), receives.end());
        by_rank(sends, [&](std::uint32_t d, std::span<const send_block> blocks) { post(d, blocks); });
    }

    void finish_exchange() {
        const std::vector<message> messages = wait_for_all();
        by_rank(std::span<const receive_block>(receives_), [&](std::uint32_t s, std::span<const receive_block> blocks) {
            std::size_t awaited = 0;
            for (const receive_block& b : blocks) {
                awaited += b.bytes;
            }
            require_size(s, messages[s].size(), awaited);
            const std::byte* next = messages[s].data();
            for (const receive_block& b : blocks) {
                if (b.bytes > 0) {
                    std::memcpy(b.data, next, b.bytes);
                    next += b.bytes;
                }
            }
        });
    }

    void fail(std::uint32_t rank, const std::string& reason) noexcept { world_->fail(rank, reason); }

private:
    using message = std::vector<std::byte>;

    /// What has come from one rank. A rank cannot send a third message before the first was taken: it needs one of the receiver's for it.
    struct lane {
        message waiting[2];
        unsigned count = 0;
    };

    struct inbox {
        std::mutex mutex;
        std::condition_variable changed;
        std::vector<lane> from;
        std::uint32_t empty = 0;  ///< lanes without a message
    };

    struct shared_state {
        shared_state(std::uint32_t n, std::chrono::milliseconds limit) : ranks(n), time_limit(limit), inboxes(n), left(n) {
            for (inbox& box : inboxes) {
                box.from.resize(n);
                box.empty = n;
            }
        }

        /// Records the first failure, drops what is under way and wakes all who wait.
        void fail(std::uint32_t rank, const std::string& why) noexcept {
            {
                const std::lock_guard lock(failure_mutex);
                if (failed.load()) {
                    return;
                }
                culprit = rank;
                try {
                    reason = why;
                } catch (...) {  // no memory for the text: the rank alone is told
                }
                failed.store(true);
            }
            for (inbox& box : inboxes) {
                const std::lock_guard lock(box.mutex);
                for (lane& l : box.from) {
                    for (message& m : l.waiting) {
                        under_way -= m.size();
                        m = {};
                    }
                    l.count = 0;
                }
                box.empty = ranks;
                box.changed.notify_all();
            }
        }

        void wake_all() noexcept {
            for (inbox& box : inboxes) {
                const std::lock_guard lock(box.mutex);
                box.changed.notify_all();
            }
        }

        void throw_if_failed() {
            if (failed.load()) {
                const std::lock_guard lock(failure_mutex);
                throw rank_failed(culprit, reason);
            }
        }

        const std::uint32_t ranks;
        const std::chrono::milliseconds time_limit;
        std::vector<inbox> inboxes;
        std::vector<std::atomic<bool>> left;
        std::atomic<std::uint64_t> under_way{0};
        std::atomic<bool> failed{false};
        std::mutex failure_mutex;  ///< of the next two
        std::uint32_t culprit = 0;
        std::string reason;
    };

    loopback(std::shared_ptr<shared_state> world, std::uint32_t rank) : world_(std::move(world)), rank_(rank) {}

    /// f(rank, its blocks) for every rank; blocks are in ascending order of ranks. @throws configuration_error where they are not
    template <class Block, class F>
    void by_rank(std::span<const Block> blocks, F&& f) {
        std::size_t first = 0;
        for (std::uint32_t r = 0; r < ranks(); ++r) {
            std::size_t end = first;
            while (end < blocks.size() && blocks[end].rank == r) {
                ++end;
            }
            f(r, blocks.subspan(first, end - first));
            first = end;
        }
        if (first != blocks.size()) {
            throw configuration_error("penstock: loopback: blocks go by ascending rank, all below " + std::to_string(ranks()));
        }
    }

    void post(std::uint32_t to, std::span<const send_block> blocks) {
        message m;
        std::size_t size = 0;
        for (const send_block& b : blocks) {
            size += b.bytes;
        }
        m.reserve(size);
        for (const send_block& b : blocks) {
            m.insert(m.end(), b.data, b.data + b.bytes);
        }
        inbox& box = world_->inboxes[to];
        const std::lock_guard lock(box.mutex);
        world_->throw_if_failed();  // under the lock: what is posted after a failure would stay
        lane& l = box.from[rank_];
        if (l.count == 2) {
            throw configuration_error("penstock: loopback: rank " + std::to_string(rank_) +
                                      " began an exchange before it had finished one");
        }
        world_->under_way += size;
        l.waiting[l.count++] = std::move(m);
        if (l.count == 1 && --box.empty == 0) {
            box.changed.notify_all();
        }
    }

    /// The next message of every rank.
    [[nodiscard]] std::vector<message> wait_for_all() {
        std::vector<message> messages(ranks());
        inbox& box = world_->inboxes[rank_];
        const auto deadline = std::chrono::steady_clock::now() + world_->time_limit;
        std::unique_lock lock(box.mutex);
        while (true) {
            world_->throw_if_failed();
            if (box.empty == 0) {
                break;
            }
            std::uint32_t gone = ranks(), late = ranks();
            for (std::uint32_t s = ranks(); s-- > 0;) {
                if (box.from[s].count == 0) {
                    late = s;
                    gone = world_->left[s].load() ? s : gone;
                }
            }
            const bool out_of_time = std::chrono::steady_clock::now() >= deadline;
            if (gone < ranks() || out_of_time) {
                const std::string missing = std::to_string(box.empty);
                lock.unlock();
                world_->fail(gone < ranks() ? gone : late, gone < ranks()
                                                               ? std::string("it has left the world while others waited for it")
                                                               : "it did not come within " + std::to_string(world_->time_limit.count()) +
                                                                     " ms (rank " + std::to_string(rank_) + " missed " + missing + " of " +
                                                                     std::to_string(ranks()) + " ranks)");
                lock.lock();
                continue;
            }
            box.changed.wait_until(lock, deadline);
        }
        for (std::uint32_t s = 0; s < ranks(); ++s) {
            lane& l = box.from[s];
            messages[s] = std::move(l.waiting[0]);
            world_->under_way -= messages[s].size();
            l.waiting[0] = std::exchange(l.waiting[1], {});
            box.empty += --l.count == 0 ? 1 : 0;
        }
        return messages;
    }

    void require_size(std::uint32_t source, std::size_t found, std::size_t wanted) {
        if (found != wanted) {
            const std::string text = "it sent " + std::to_string(found) + " bytes where rank " + std::to_string(rank_) + " awaits " +
                                     std::to_string(wanted) + ": do all ranks make the same calls?";
            fail(source, text);
            world_->throw_if_failed();
        }
    }

    std::shared_ptr<shared_state> world_;
    std::uint32_t rank_ = 0;
    std::vector<receive_block> receives_;
};

}  // namespace transport
}  // namespace penstock::inline v0_1
