#pragma once

#include <penstock/stream/byte_source.hpp>
#include <penstock/stream/place.hpp>
#include <penstock/stream/progress.hpp>
#include <penstock/stream/transfer_plan.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// A load that a weight stream is bringing, and the handle by which its owner waits for it.

namespace penstock::inline v0_1 {

/// What a load moved. GB = 1e9 bytes.
struct stream_report {
    std::uint64_t bytes = 0;
    double seconds = 0;               ///< from start() to the last chunk; run(), load(): to the arrival of the last byte
    std::uint64_t chunks = 0;         ///< brought
    std::uint64_t reads = 0;          ///< calls of the byte source
    std::uint64_t staging_bytes = 0;  ///< host memory of the stream that they passed through; of run(), load()
    std::uint64_t place_bytes = 0;    ///< memory of the place that was taken for them; of load()
    std::string source;               ///< what the bytes came from: "pread, in the page cache", "pinned memory", ...

    [[nodiscard]] double gb_per_s() const noexcept { return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0; }
};

namespace detail {

/// Which way a chunk takes.
enum class route : std::uint8_t {
    to_host,     ///< a reader brings it straight to its destination
    staged,      ///< a reader brings it to a staging slot, from which it is copied
    as_it_lies,  ///< a reader enqueues the copy from where the bytes are
    by_caller    ///< start() enqueues the copy from where the bytes are
};

/// How many chunks nobody has taken.
struct untaken_chunks {
    std::int64_t all = 0;
    std::int64_t staged = 0;      ///< of these
    std::int64_t as_it_lies = 0;  ///< of these

    void add(const untaken_chunks& n, std::int64_t times) noexcept {
        all += times * n.all;
        staged += times * n.staged;
        as_it_lies += times * n.as_it_lies;
    }
    void add(route way, std::int64_t n) noexcept { add({1, way == route::staged, way == route::as_it_lies}, n); }
};

/// Everything about one load. Plan, source and place do not change; the rest is guarded by the engine's mutex.
struct load_state : plan_parts {
    load_state(plan_parts plan, byte_source& from, place to, progress_callback call, std::stop_token token)
        : plan_parts(std::move(plan)),
          source(&from),
          where(to),
          callback(std::move(call)),
          stop(std::move(token)),
          routes(chunks.size(), route::to_host),
          taken(chunks.size()),
          left(requests.size()),
          dropped(requests.size()),
          untaken(requests.size()),
          chunks_left(chunks.size()) {
        for (std::uint32_t r = 0; r < requests.size(); ++r) {
            number_of.emplace(requests[r].what.id, r);
            left[r] = requests[r].what.chunks;
            bytes += requests[r].bytes;
        }
    }

    std::unordered_map<std::uint64_t, std::uint32_t> number_of;  ///< index into requests by the caller's number
    std::uint64_t bytes = 0;
    byte_source* source = nullptr;
    place where;
    progress_callback callback;
    std::stop_token stop;
    std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();

    std::vector<route> routes;            ///< by chunk; fixed before the load is enqueued
    std::vector<std::uint8_t> taken;      ///< by chunk: someone brings it or has brought it
    std::vector<std::uint32_t> left;      ///< by request: chunks that have not arrived
    std::vector<std::uint8_t> dropped;    ///< by request: chunks of it were left out
    std::vector<untaken_chunks> untaken;  ///< by request
    std::uint64_t chunks_left = 0;
    std::uint64_t bytes_done = 0;
    std::uint64_t reads = 0;
    std::uint32_t reading = 0;    ///< readers that read its files
    std::uint32_t in_flight = 0;  ///< threads that bring a chunk of this load, or call its callback
    double seconds = 0;
    std::exception_ptr error;  ///< the first; once it is set no further chunk is begun

    std::mutex in_callback;  ///< one thread at a time calls back

    [[nodiscard]] double elapsed() const noexcept {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    }
    [[nodiscard]] bool over() const noexcept { return in_flight == 0 && (chunks_left == 0 || error != nullptr); }
};

/// What a ticket needs of the engine that brings its load.
class load_engine {
public:
    virtual ~load_engine() = default;
    virtual void fail(load_state& load, std::exception_ptr why) = 0;
    virtual void change(load_state& load, std::uint32_t request, urgency level, std::uint64_t deadline, std::uint32_t weight) = 0;
    virtual void promote(load_state& load, std::uint32_t request) = 0;
    virtual void drop(load_state& load, std::uint32_t request) = 0;

    std::mutex mutex;
    std::condition_variable arrived;  ///< a chunk arrived, a load failed, a thread left a load
};

}  // namespace detail

/// A running load. Its destructor begins no further chunk, waits for those that have begun, and then nothing writes to the destination any
/// more on the host's side (copies already enqueued on a device's stream run in that stream's order). Move-only. Source, destination and
/// source memory outlive it. One thread at a time may use a ticket, save for wait(), which several may call.
class ticket {
public:
    ticket() = default;

    ticket(std::shared_ptr<detail::load_engine> engine, std::shared_ptr<detail::load_state> load)
        : engine_(std::move(engine)), load_(std::move(load)) {
        if (load_->stop.stop_possible()) {
            on_stop_ = std::make_unique<std::stop_callback<std::function<void()>>>(load_->stop, [e = engine_.get(), l = load_.get()] {
                e->fail(*l, std::make_exception_ptr(cancelled("penstock: the load was cancelled")));
            });
        }
    }

    ticket(ticket&&) noexcept = default;
    ticket& operator=(ticket&& other) noexcept {
        if (this != &other) {
            finish();
            engine_ = std::move(other.engine_);
            load_ = std::move(other.load_);
            on_stop_ = std::move(other.on_stop_);
        }
        return *this;
    }
    ~ticket() { finish(); }

    /// Returns when every byte is at its place (host), or every copy is enqueued on the place's stream (device).
    /// @throws the first error of the load: io_error, cuda_error, cancelled, what the callback threw
    void wait() {
        std::unique_lock lock(engine_->mutex);
        engine_->arrived.wait(lock, [&] { return load_->over(); });
        if (load_->error) {
            std::rethrow_exception(load_->error);
        }
    }

    /// The same for one request. @throws configuration_error for a number that the load does not have, cancelled for a request that
    /// cancel() has cut short
    void wait(std::uint64_t request) {
        const std::uint32_t r = number(request);
        std::unique_lock lock(engine_->mutex);
        engine_->arrived.wait(lock, [&] { return load_->left[r] == 0 || (load_->error && load_->in_flight == 0); });
        if (load_->left[r] > 0) {
            std::rethrow_exception(load_->error);
        }
        if (load_->dropped[r] != 0) {
            throw cancelled("penstock: request " + std::to_string(request) + " of the load was cancelled");
        }
    }

    /// Whether wait() would return at once.
    [[nodiscard]] bool done() const {
        const std::lock_guard lock(engine_->mutex);
        return load_->over();
    }

    /// Makes what is left of a request as urgent as can be: it is not read twice, it moves to the front of a scheduler that has priorities.
    void promote(std::uint64_t request) { engine_->promote(*load_, number(request)); }

    /// Gives what is left of a request another level, deadline and weight, up or down; chunks that were begun stay begun. A scheduler whose
    /// queue has no change() hears only of what became more urgent. @throws configuration_error for a number that the load does not have
    void change(std::uint64_t request, urgency level, std::uint64_t deadline = no_deadline, std::uint32_t weight = 1) {
        engine_->change(*load_, number(request), level, deadline, weight);
    }

    /// Begins no further chunk of a request; the other requests of the load go on, and wait() waits for them alone. Does nothing for a
    /// request that has begun its last chunk. @throws configuration_error for a number that the load does not have
    void cancel(std::uint64_t request) { engine_->drop(*load_, number(request)); }

    /// What has been moved so far; after wait(), all of it.
    [[nodiscard]] stream_report report() const {
        stream_report r;
        std::set<std::string> sources;
        std::int64_t last_file = -1;
        for (const planned_chunk& c : load_->chunks) {
            if (c.from == bytes_from::pinned || c.from == bytes_from::memory) {
                sources.insert(c.from == bytes_from::pinned ? "pinned memory" : "memory");
            } else if (c.file != last_file) {
                last_file = c.file;
                sources.insert(load_->source->condition(c.file));
            }
        }
        for (const std::string& s : sources) {
            r.source += s.empty() ? s : (r.source.empty() ? "" : "; ") + s;
        }
        const std::lock_guard lock(engine_->mutex);
        r.bytes = load_->bytes_done;
        r.seconds = load_->over() ? load_->seconds : load_->elapsed();
        r.chunks = load_->chunks.size() - load_->chunks_left;
        r.reads = load_->reads;
        return r;
    }

private:
    [[nodiscard]] std::uint32_t number(std::uint64_t request) const {
        const auto found = load_->number_of.find(request);
        if (found == load_->number_of.end()) {
            throw configuration_error("penstock: a load was asked for request " + std::to_string(request) + ", which it does not have");
        }
        return found->second;
    }

    void finish() noexcept {
        on_stop_.reset();            // first, and without the lock, which its callback takes
        progress_callback callback;  // goes without the lock: what it holds may ask the stream something when it dies
        std::exception_ptr error;    // goes with the ticket, not with the reader that happens to be the last to know the load
        if (load_ != nullptr) {
            std::unique_lock lock(engine_->mutex);
            const bool running = !load_->over();
            lock.unlock();
            if (running) {
                engine_->fail(*load_, std::make_exception_ptr(cancelled("penstock: the ticket of the load was destroyed")));
            }
            lock.lock();
            engine_->arrived.wait(lock, [&] { return load_->over(); });
            error = std::move(load_->error);
            callback = std::move(load_->callback);
        }
        load_.reset();
        engine_.reset();
    }

    std::shared_ptr<detail::load_engine> engine_;
    std::shared_ptr<detail::load_state> load_;
    std::unique_ptr<std::stop_callback<std::function<void()>>> on_stop_;
};

}  // namespace penstock::inline v0_1
