#include <penstock/stream/issue_window.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <vector>

/// The way of chunks from the scheduler's queue through the window and its governor to the link, in a simulated clock, over random traces. The
/// link moves 50 bytes a nanosecond, a chunk after the other, and shares itself evenly with a kernel that misses; two chunks are on the engine.

namespace {

using namespace penstock;
using namespace std::chrono_literals;
using std::chrono::nanoseconds;

constexpr std::uint32_t traces = 10'000;
constexpr std::uint64_t bytes_per_ns = 50;

struct dice {
    explicit dice(std::uint64_t seed) : numbers(seed) {}
    std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(numbers() % n); }
    std::mt19937_64 numbers;
};

struct arrival {
    nanoseconds at{0};
    request what;
};
struct interval {
    nanoseconds from{0}, to{0};
};
struct trace {
    std::vector<arrival> arrivals;  ///< by time
    std::vector<interval> misses;   ///< a kernel wants the link, by time
    std::vector<interval> from_device;
    std::uint32_t slots = 0;  ///< chunks are read ahead, into so many slots and one for what is on demand; 0: they are copied as they lie
};

trace any_trace(std::uint64_t seed) {
    dice d(seed);
    trace t;
    nanoseconds now{0};
    const std::uint64_t chunk_bytes = std::uint64_t{1 + d.below(8)} << 20;
    for (std::uint32_t i = 1 + d.below(8); i > 0; --i) {
        now += nanoseconds(d.below(3) == 0 ? 0 : d.below(400'000));
        t.arrivals.push_back({now,
                              {.id = i,
                               .chunks = 1 + d.below(8),
                               .level = static_cast<urgency>(d.below(3)),
                               .deadline = d.below(2) == 0 ? no_deadline : d.below(20),
                               .weight = 1 + d.below(16),
                               .chunk_bytes = chunk_bytes}});
    }
    for (auto* list : {&t.misses, &t.from_device}) {
        nanoseconds at(d.below(300'000));
        for (std::uint32_t i = d.below(6); i > 0; --i) {
            const nanoseconds to = at + nanoseconds(1 + d.below(500'000));
            list->push_back({at, to});
            at = to + nanoseconds(d.below(400'000));
        }
    }
    if (d.below(16) == 0) {
        t.misses = {{nanoseconds(d.below(2'000'000)), 62ms}};
    }
    t.slots = d.below(2) * 4;
    return t;
}

bool within(const std::vector<interval>& list, nanoseconds now) {
    return std::ranges::any_of(list, [&](const interval& i) { return i.from <= now && now < i.to; });
}

struct flow {
    request what;
    std::uint32_t pulled = 0;  ///< chunks that the queue has named
    std::uint32_t sent = 0;    ///< chunks that went on the link
};

struct waiting_chunk {
    flow* of;
    std::uint32_t index;
    bool staged;

    const request& wanted() const { return of->what; }
    std::uint64_t bytes() const { return of->what.chunk_bytes; }
    bool failed() const { return false; }
    bool as_it_lies() const { return !staged; }
};

struct marker {
    explicit marker(waiting) {}
    bool over() const { return true; }
};

enum broken : std::uint32_t {
    starved = 1,     ///< a request did not end
    idled = 2,       ///< the link was idle while something waited that the governor let go
    unstrict = 4,    ///< something went while something on demand waited
    disordered = 8,  ///< a chunk did not go in the order in which the queue named those of its precedence
    unfair = 16,     ///< of two requests of one class that wait one got more than a chunk ahead, and those chosen before their turn
    too_much = 32,   ///< what is not on demand got more than it may
    too_little = 64  ///< or less than the floor
};

struct went {
    nanoseconds at{0};
    std::uint64_t request = 0;
    std::uint32_t index = 0;
    bool on_demand = false;
    std::uint64_t bytes = 0;
    friend bool operator==(const went&, const went&) = default;
};

/// What a governor promises of what is not on demand, while it waits without a break: at most `most` bytes in a time, at least `least`, both
/// give or take a chunk.
struct promise {
    double most = bytes_per_ns, least = 0;  ///< bytes a nanosecond
    bool ranked = true;
    bool fair = false;  ///< of traces without anything on demand, which a scheduler without levels has to look for
};

template <class Scheduler>
class simulation {
public:
    simulation(const trace& t, promise p) : trace_(t), promise_(p), flows_(t.arrivals.size()) {
        for (arrival& a : trace_.arrivals) {
            a.what.level = p.fair ? urgency::prefetch : a.what.level;
        }
    }

    std::uint32_t run() {
        std::size_t arrived = 0;
        while (now_ < 1s) {
            for (; arrived < trace_.arrivals.size() && trace_.arrivals[arrived].at <= now_; ++arrived) {
                flows_[arrived].what = trace_.arrivals[arrived].what;
                queue_.push(flows_[arrived].what);
            }
            while (!engine_.empty() && engine_.front().left <= 0) {
                window_.look(now_, seen());
                window_.ended(engine_.size() == 1 ? window_.newest_copy() : window_.oldest_copy(), now_);
                engine_.erase(engine_.begin());
            }
            nanoseconds again = nanoseconds::max();
            choose();
            while (engine_.size() < 2 && send(again)) {
            }
            const bool all_sent = std::ranges::all_of(flows_, [](const flow& f) { return f.sent == f.what.chunks; });
            if (arrived == flows_.size() && all_sent && engine_.empty()) {
                break;
            }
            pass_time(again, arrived);
        }
        found(starved, std::ranges::any_of(flows_, [](const flow& f) { return f.sent < f.what.chunks; }));
        hold_to_rates();
        return broken_;
    }

    std::vector<went> log;

private:
    struct moving {
        double left = 0;  ///< bytes
    };

    void found(broken what, bool is_so) { broken_ |= is_so ? static_cast<std::uint32_t>(what) : 0u; }
    static bool on_demand(const flow& f) { return f.what.level == urgency::on_demand; }
    static bool waits(const flow& f) { return f.sent < f.what.chunks; }

    link_sight seen() const { return {0, within(trace_.misses, now_) ? 1u : 0u, within(trace_.from_device, now_) ? 1u : 0u}; }

    /// What readers do.
    void choose() {
        while (true) {
            const bool urgent = std::ranges::any_of(flows_, [](const flow& f) { return on_demand(f) && f.pulled < f.what.chunks; });
            const bool room = trace_.slots == 0 ? window_.wants_one(urgent)
                              : promise_.ranked ? order_.size() < trace_.slots + (urgent ? 1 : 0)
                                                : order_.size() < trace_.slots || urgent;
            const std::optional<chunk> c = room ? queue_.next() : std::nullopt;
            if (!c) {
                return;
            }
            flow& f = *std::ranges::find_if(flows_, [&](const flow& g) { return g.what.id == c->request; });
            window_.push(std::make_shared<waiting_chunk>(waiting_chunk{&f, c->index, trace_.slots > 0}));
            order_.push_back({&f, c->index});
            ++f.pulled;
        }
    }

    /// What the desk of an engine does where there is room. Whether a chunk went.
    bool send(nanoseconds& again) {
        const bool any = window_.go_on();
        const auto next = window_.take(now_, seen(), again);
        if (!next) {
            found(idled, any && again <= now_);
            again = any ? again : nanoseconds::max();
            return false;
        }
        check(**next);
        window_.became_newest((*next)->bytes(), now_);
        engine_.push_back({static_cast<double>((*next)->bytes())});
        log.push_back({now_, (*next)->wanted().id, (*next)->index, on_demand(*(*next)->of), (*next)->bytes()});
        ++(*next)->of->sent;
        choose();
        return true;
    }

    void check(const waiting_chunk& c) {
        const flow& f = *c.of;
        if (promise_.ranked) {
            found(unstrict, !on_demand(f) && std::ranges::any_of(flows_, [](const flow& g) { return on_demand(g) && waits(g); }));
        }
        const auto same = [&](const auto& o) {
            return promise_.ranked ? o.first->what.level == f.what.level && o.first->what.deadline == f.what.deadline
                                   : on_demand(*o.first) == on_demand(f);
        };
        const auto first = std::ranges::find_if(order_, same);
        found(disordered, first == order_.end() || first->first != &f || first->second != c.index);
        std::erase(order_, std::pair<flow*, std::uint32_t>(c.of, c.index));
        for (const flow& g : flows_) {
            if (promise_.fair && &g != &f && waits(g) && waits(f) && g.what.id != 0) {
                auto& ahead = ahead_[std::minmax(&f, &g)];
                ahead += &f < &g ? 1 : -1;
                auto& [least, most] = range_[std::minmax(&f, &g)];
                least = std::min(least, ahead);
                most = std::max(most, ahead);
                found(unfair, most - least > 1 + static_cast<int>(std::max(trace_.slots, 1u)));
            }
        }
    }

    void pass_time(nanoseconds again, std::size_t arrived) {
        const bool shared = !engine_.empty() && within(trace_.misses, now_);
        const double rate = static_cast<double>(bytes_per_ns) / (shared ? 2 : 1);
        nanoseconds next = std::max(again, now_ + 1ns);
        if (arrived < trace_.arrivals.size()) {
            next = std::min(next, trace_.arrivals[arrived].at);
        }
        if (!engine_.empty()) {
            next = std::min(next, now_ + nanoseconds(static_cast<std::int64_t>(std::ceil(engine_.front().left / rate))));
        }
        for (const auto* list : {&trace_.misses, &trace_.from_device}) {
            for (const interval& i : *list) {
                for (const nanoseconds edge : {i.from, i.to}) {
                    next = edge > now_ ? std::min(next, edge) : next;
                }
            }
        }
        next = std::min(std::max(next, now_ + 1ns), now_ + 100us);  // as the desk does, it looks again
        if (!engine_.empty()) {
            engine_.front().left -= rate * static_cast<double>((next - now_).count());
        }
        now_ = next;
    }

    /// Over every span of the log in which something that is not on demand waited all the time.
    void hold_to_rates() {
        nanoseconds since{0};
        double sum = 0, chunk_bytes = 0;
        for (const went& w : log) {
            if (w.on_demand) {
                continue;
            }
            if (sum > 0) {
                const double time = static_cast<double>((w.at - since).count());
                found(too_much, sum - chunk_bytes > promise_.most * time * 1.000001 + chunk_bytes);
            }
            since = sum == 0 ? w.at : since;
            chunk_bytes = static_cast<double>(w.bytes);
            sum += chunk_bytes;
        }
        const went* last = nullptr;
        for (const went& w : log) {
            const bool gap = last != nullptr && !last->on_demand && !w.on_demand && waited_all_through(last->at, w.at);
            found(too_little,
                  promise_.least > 0 && gap &&
                      static_cast<double>((w.at - last->at).count()) * promise_.least > static_cast<double>(last->bytes) * 1.01 + 3e6);
            last = &w;
        }
    }

    bool waited_all_through(nanoseconds from, nanoseconds to) const {  // nothing on demand came, and what went at `to` was there at `from`
        return std::ranges::none_of(trace_.arrivals, [&](const arrival& a) { return a.at > from && a.at <= to; });
    }

    trace trace_;
    promise promise_;
    typename Scheduler::queue queue_;
    detail::issue_window<Scheduler, marker, std::shared_ptr<waiting_chunk>> window_{2};
    std::vector<flow> flows_;
    std::vector<std::pair<flow*, std::uint32_t>> order_;  ///< as the queue named them, of those that wait
    std::map<std::pair<const flow*, const flow*>, int> ahead_;
    std::map<std::pair<const flow*, const flow*>, std::pair<int, int>> range_;
    std::vector<moving> engine_;
    nanoseconds now_{0};
    std::uint32_t broken_ = 0;
};

template <class Scheduler>
void holds(promise p) {
    std::uint32_t broken = 0;
    bool same = true;
    std::size_t chunks = 0;
    for (std::uint64_t seed = 0; seed < traces; ++seed) {
        const trace t = any_trace(seed);
        simulation<Scheduler> once(t, p);
        broken |= once.run();
        chunks += once.log.size();
        if (seed % 10 == 0) {
            simulation<Scheduler> again(t, p);
            again.run();
            same = same && again.log == once.log;
        }
    }
    CHECK(broken == 0);
    CHECK(same);
    CHECK(chunks > std::size_t{10} * traces);
}

template <class Scheduler>
std::uint32_t faults(promise p) {
    std::uint32_t all = 0;
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
        all |= simulation<Scheduler>(any_trace(seed), p).run();
    }
    return all;
}

using capped = governor::cap<bytes{5'000'000'000}>;  // 5 bytes a nanosecond, a tenth of the link
constexpr double whole = bytes_per_ns;
constexpr double floor_rate = 10 * governor::adaptive::floor;  // while the link is not known

struct closed : governor::none {
    nanoseconds may_go(nanoseconds) const { return nanoseconds::max(); }
};
struct closed_beside_misses : governor::adaptive {
    nanoseconds may_go(nanoseconds now) const { return pace(now) == floor ? nanoseconds::max() : adaptive::may_go(now); }
};
struct forgetful_cap : capped {
    void went(nanoseconds now, std::uint64_t size) { capped::went(now, size / 2); }
};
struct upside_down : scheduler::priority<3> {
    static precedence precedence_of(const request& r) { return {2 - scheduler::priority<3>::precedence_of(r).level, r.deadline}; }
};
struct later_first : scheduler::fifo {
    static precedence precedence_of(const request& r) { return {0, r.id}; }
};

}  // namespace

TEST_CASE("the window in a simulated clock, without a governor") {
    holds<scheduler::priority<3>>({whole, 0});
    holds<scheduler::weighted_fair>({whole, 0});
    holds<scheduler::fifo>({whole, 0, false});
    holds<scheduler::round_robin>({whole, 0, false, true});
}

TEST_CASE("the window in a simulated clock, under a cap: no more than that, and no less") {
    holds<throttled<scheduler::priority<3>, capped>>({5, 5});
    holds<throttled<scheduler::weighted_fair, capped>>({5, 5});
    holds<throttled<scheduler::fifo, capped>>({5, 5, false});
    holds<throttled<scheduler::round_robin, capped>>({5, 5, false, true});
}

TEST_CASE("the window in a simulated clock, under the adaptive governor: never less than the floor") {
    holds<throttled<scheduler::priority<3>, governor::adaptive>>({whole, floor_rate});
    holds<throttled<scheduler::weighted_fair, governor::adaptive>>({whole, floor_rate});
    holds<throttled<scheduler::fifo, governor::adaptive>>({whole, floor_rate, false});
    holds<throttled<scheduler::round_robin, governor::adaptive>>({whole, floor_rate, false, true});
}

TEST_CASE("the simulation of the window finds what is wrong") {
    using priority = scheduler::priority<3>;
    CHECK(faults<priority>({whole, 0}) == 0);
    CHECK((faults<throttled<priority, closed>>({whole, 0}) & starved) == starved);
    CHECK((faults<throttled<priority, closed_beside_misses>>({whole, floor_rate}) & too_little) == too_little);
    CHECK((faults<throttled<priority, forgetful_cap>>({5, 5}) & too_much) == too_much);
    CHECK((faults<priority>({5, 5}) & too_much) == too_much);
    CHECK((faults<throttled<priority, capped>>({whole, 10}) & too_little) == too_little);
    CHECK((faults<upside_down>({whole, 0}) & unstrict) == unstrict);
    CHECK((faults<scheduler::fifo>({whole, 0}) & unstrict) == unstrict);
    CHECK((faults<later_first>({whole, 0, false}) & disordered) == disordered);
    CHECK((faults<scheduler::fifo>({whole, 0, false, true}) & unfair) == unfair);
}
