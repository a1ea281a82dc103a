#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

/// Independent pieces of work over several threads, with the outcome of one thread.

namespace penstock::inline v0_1::detail {

/// work(i) for each i < count, by the calling thread and up to `threads` - 1 others, which have ended when this returns. Fewer threads where
/// the system gives no more.
/// @throws what the first piece threw, in the order of i, of those that threw: the pieces before it are done, those after it may be left out.
/// It is the exception that a loop would have thrown.
template <class Work>
void work_in_order(std::size_t count, std::size_t threads, const Work& work) {
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> failed{std::numeric_limits<std::size_t>::max()};
    std::exception_ptr problem;
    std::mutex mutex;
    // Pieces are taken in ascending order: whoever fails at i knows that all before i are done or in the hands of a thread that ends them.
    const auto take_pieces = [&] {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < std::min(count, failed.load());) {
            try {
                work(i);
            } catch (...) {
                const std::lock_guard lock(mutex);
                if (i < failed.load()) {
                    failed.store(i);
                    problem = std::current_exception();
                }
            }
        }
    };
    {
        std::vector<std::jthread> others;
        try {
            others.reserve(threads);
            while (others.size() + 1 < std::min(threads, count)) {
                others.emplace_back(take_pieces);
            }
        } catch (const std::system_error&) {
            // No further thread can be had: the work is done by those that there are.
        }
        take_pieces();
    }
    if (problem) {
        std::rethrow_exception(problem);
    }
}

}  // namespace penstock::inline v0_1::detail
