#pragma once

#include <penstock/error.hpp>
#include <penstock/stream/place.hpp>
#include <penstock/stream/progress.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// One thread a place, and what they have to agree on: the first error, and progress.

namespace penstock::inline v0_1::detail {

[[nodiscard]] inline std::string name_of(const place& where, std::size_t number) {
    return where.on_host() ? "place " + std::to_string(number) + " (host memory)"
                           : "GPU " + std::to_string(where.device) + " (place " + std::to_string(number) + ")";
}

/// Throws `problem` again, of the same type, its message naming the place. What is not the library's is thrown as it is.
[[noreturn]] inline void rethrow_naming(const std::exception_ptr& problem, const std::string& who) {
    const auto text = [&](const error& e) {
        std::string_view what = e.what();
        if (constexpr std::string_view own = "penstock: "; what.starts_with(own)) {
            what.remove_prefix(own.size());
        }
        return "penstock: " + who + ": " + std::string(what);
    };
    try {
        std::rethrow_exception(problem);
    } catch (const device_lost& e) {
        throw device_lost(e.code(), text(e));
    } catch (const cuda_error& e) {
        throw cuda_error(e.code(), text(e));
    } catch (const out_of_memory& e) {
        throw out_of_memory(text(e));
    } catch (const configuration_error& e) {
        throw configuration_error(text(e));
    } catch (const io_error& e) {
        throw io_error(text(e));
    } catch (const format_error& e) {
        throw format_error(text(e));
    } catch (const cancelled& e) {
        throw cancelled(text(e));
    }
}

/// Calls `work(i, stop)` for each place, each in a thread of its own; returns when all have ended. When one throws, or `outer` is asked to
/// stop, `stop` is asked to. @throws what was thrown first, naming its place
template <class Work>
void on_every_place(std::span<const place> places, const std::stop_token& outer, Work&& work) {
    std::mutex mutex;
    std::exception_ptr first;
    std::size_t place_of_first = 0;
    std::stop_source all;
    const auto fail = [&](std::size_t i) {
        {
            const std::lock_guard lock(mutex);
            if (first == nullptr) {
                first = std::current_exception();
                place_of_first = i;
            }
        }
        all.request_stop();
    };
    {
        const std::stop_callback asked(outer, [&all] { all.request_stop(); });
        std::vector<std::jthread> threads;
        threads.reserve(places.size());
        for (std::size_t i = 0; i < places.size(); ++i) {
            try {
                threads.emplace_back([&, i] {
                    try {
                        work(i, all.get_token());
                    } catch (...) {
                        fail(i);
                    }
                });
            } catch (...) {  // no thread to be had
                fail(i);
                break;
            }
        }
    }
    if (first != nullptr) {
        rethrow_naming(first, name_of(places[place_of_first], place_of_first));
    }
}

/// Progress of several loads as one. It outlives the callbacks that it makes.
class shared_progress {
public:
    /// `total`: bytes of all loads together.
    shared_progress(progress_callback callback, std::uint64_t total, std::size_t loads)
        : callback_(std::move(callback)), total_(total), done_(loads, 0) {}

    /// A callback for one of the loads, which moved `before` bytes in earlier runs; empty where nobody listens.
    [[nodiscard]] progress_callback of(std::size_t load, std::uint64_t before) {
        if (!callback_) {
            return {};
        }
        return [this, load, before](const progress& now) {
            const std::lock_guard lock(mutex_);
            sum_ += before + now.bytes - std::exchange(done_[load], before + now.bytes);
            callback_({sum_, total_, std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count()});
        };
    }

private:
    progress_callback callback_;
    std::uint64_t total_;
    std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
    std::mutex mutex_;
    std::uint64_t sum_ = 0;
    std::vector<std::uint64_t> done_;  ///< by load
};

}  // namespace penstock::inline v0_1::detail
