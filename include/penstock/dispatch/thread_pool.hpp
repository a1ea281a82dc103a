#pragma once

#include <penstock/buffer/host_cores.hpp>
#include <penstock/config.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

/// A few threads that share out numbered items. Started by the constructor, joined by the destructor; asleep between calls.
class thread_pool {
public:
    /// @param threads that work on a call, the caller's own among them; 0: one for each usable core.
    explicit thread_pool(unsigned threads = 0) {
        const unsigned wanted = threads != 0 ? threads : usable_cores();
        helpers_.reserve(wanted - 1);
        try {
            for (unsigned w = 1; w < wanted; ++w) {
                helpers_.emplace_back([this, w] { serve(w); });
            }
        } catch (...) {  // no more threads to be had
            stop();
            throw;
        }
    }

    ~thread_pool() { stop(); }

    thread_pool(const thread_pool&) = delete;
    thread_pool& operator=(const thread_pool&) = delete;

    /// Threads that work on a call.
    [[nodiscard]] unsigned size() const noexcept { return static_cast<unsigned>(helpers_.size()) + 1; }

    /// Calls work(item, worker) for every item below `items` and returns when all have returned. `worker` is below size() and no two
    /// calls with the same worker run at once. Calls of `run` from several threads go one after another. Rethrows the first exception;
    /// the items that had not begun by then are left out.
    template <class Work>
    void run(std::size_t items, Work&& work) {
        if (items == 0) {
            return;
        }
        const std::scoped_lock one_call(call_);
        using work_type = std::remove_reference_t<Work>;
        task t{[](void* context, std::size_t item, unsigned worker) { (*static_cast<work_type*>(context))(item, worker); },
               const_cast<void*>(static_cast<const void*>(&work)), items};
        const bool alone = items == 1 || helpers_.empty();
        if (!alone) {
            const std::scoped_lock lock(mutex_);
            task_ = &t;
            ++generation_;
        }
        if (!alone) {
            wake_.notify_all();
        }
        drain(t, 0);
        if (!alone) {  // those who have not woken by now find no task
            std::unique_lock lock(mutex_);
            task_ = nullptr;
            idle_.wait(lock, [this] { return busy_ == 0; });
        }
        if (t.failure) {
            std::rethrow_exception(t.failure);
        }
    }

private:
    struct task {
        void (*call)(void* context, std::size_t item, unsigned worker);
        void* context;
        std::size_t items;
        std::atomic<std::size_t> next{0};
        std::mutex failing{};
        std::exception_ptr failure{};
    };

    static void drain(task& t, unsigned worker) noexcept {
        for (std::size_t item; (item = t.next.fetch_add(1, std::memory_order_relaxed)) < t.items;) {
            try {
                t.call(t.context, item, worker);
            } catch (...) {
                const std::scoped_lock lock(t.failing);
                if (!t.failure) {
                    t.failure = std::current_exception();
                }
                t.next.store(t.items, std::memory_order_relaxed);
            }
        }
    }

    void serve(unsigned worker) {
        std::unique_lock lock(mutex_);
        for (std::size_t seen = 0;;) {
            wake_.wait(lock, [&] { return stopping_ || (task_ != nullptr && generation_ != seen); });
            if (stopping_) {
                return;
            }
            seen = generation_;
            task& t = *task_;
            ++busy_;
            lock.unlock();
            drain(t, worker);
            lock.lock();
            if (--busy_ == 0) {
                idle_.notify_one();
            }
        }
    }

    void stop() noexcept {
        {
            const std::scoped_lock lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& helper : helpers_) {
            helper.join();
        }
    }

    std::mutex call_;
    std::mutex mutex_;  ///< guards what follows
    std::condition_variable wake_;
    std::condition_variable idle_;
    task* task_ = nullptr;
    std::size_t generation_ = 0;
    unsigned busy_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> helpers_;
};

}  // namespace penstock::inline v0_1
