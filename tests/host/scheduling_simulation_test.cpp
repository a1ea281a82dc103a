#include <penstock/policy/scheduling.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

/// Every scheduler on a simulated link, which moves a chunk a tick and asks for the next when it has moved one, over random traces. What
/// must hold is checked at every chunk boundary against what is known of the requests; the checks are held by schedulers that are wrong.

namespace {

using namespace penstock;

constexpr std::uint32_t traces = 10'000;

/// Numbers that are the same with every standard library.
struct dice {
    explicit dice(std::uint64_t seed) : numbers(seed) {}
    std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(numbers() % n); }
    std::mt19937_64 numbers;
};

struct event {
    enum { arrival, change, cancellation } what = arrival;
    std::uint64_t at = 0;  ///< tick
    std::size_t flow = 0;
    request now;
};

struct trace {
    std::size_t flows = 0;
    std::vector<event> events;  ///< by time
};

request any_request(dice& d, std::uint64_t id, std::uint64_t now) {
    return {id,
            d.below(12),
            static_cast<urgency>(d.below(4)),  // one of them is beyond the last level
            d.below(3) == 0 ? no_deadline : now + d.below(40),
            d.below(2) == 0 ? 1u << d.below(7) : d.below(100),
            1 + 1000 * d.below(8)};
}

trace any_trace(std::uint64_t seed) {
    dice d(seed);
    trace t;
    t.flows = 1 + d.below(20);
    std::uint64_t now = 0;
    for (std::size_t i = 0; i < t.flows; ++i) {
        now += d.below(16) == 0 ? 60 : d.below(3) == 0 ? 0 : d.below(10);
        const std::uint64_t id = i * 0x9e3779b97f4a7c15u;
        const request r = any_request(d, id, now);
        t.events.push_back({event::arrival, now, i, r});
        for (std::uint64_t later = now; d.below(3) == 0;) {
            later += d.below(20);
            request other = any_request(d, id, later);
            other.chunks = d.below(4) == 0 ? other.chunks : r.chunks;
            other.chunk_bytes = r.chunk_bytes;
            t.events.push_back({d.below(4) == 0 ? event::cancellation : event::change, later, i, other});
        }
    }
    std::ranges::stable_sort(t.events, {}, &event::at);
    return t;
}

trace without_deadlines(trace t) {
    for (event& e : t.events) {
        e.now.deadline = no_deadline;
    }
    return t;
}

/// What is known of a request.
struct flow {
    request what;
    std::uint32_t given = 0;
    std::uint64_t arrived = 0;  ///< how many came before
    std::uint64_t came = 0;     ///< the same, to its level
    std::uint64_t turn = 0;     ///< events before its last chunk or, without one, its arrival
    bool cancelled = false;
    bool touched = false;  ///< given a chunk or changed since it came to its level

    bool waits() const { return !cancelled && given < what.chunks; }
    std::uint32_t level() const { return std::min(static_cast<std::uint32_t>(what.level), 2u); }
    /// bytes * bytes left / tokens
    double cost() const {
        const double bytes = static_cast<double>(what.chunk_bytes);
        return bytes * bytes * (what.chunks - given) / std::max(what.weight, 1u);
    }
};

/// What a scheduler promises. `passes(f, g)`: f may go while g of the same level waits. `cost(f)` of f's next chunk: of two that wait at the
/// same level the sums differ by `bound` at most, over any time.
struct fifo_promise {
    static constexpr bool levels = false, fair = false;
    static bool passes(const flow& f, const flow& g) { return f.arrived < g.arrived; }
    static double cost(const flow&) { return 0; }
    static double bound(double, double) { return 0; }
};
struct round_robin_promise {
    static constexpr bool levels = false, fair = true;
    static bool passes(const flow& f, const flow& g) { return f.turn < g.turn; }
    static double cost(const flow&) { return 1; }
    static double bound(double, double) { return 1; }
};
struct priority_promise {
    static constexpr bool levels = true, fair = false;
    static bool passes(const flow& f, const flow& g) {
        return f.what.deadline != g.what.deadline ? f.what.deadline < g.what.deadline : f.came < g.came;
    }
    static double cost(const flow&) { return 0; }
    static double bound(double, double) { return 0; }
};
struct weighted_fair_promise {
    static constexpr bool levels = true, fair = true;
    static bool passes(const flow& f, const flow& g) { return f.touched || g.touched || f.came < g.came || f.cost() < g.cost(); }
    static double cost(const flow& f) { return f.cost(); }
    static double bound(double a, double b) { return (a + b) * (1 + 1e-9); }  // rounding
};

enum broken : std::uint32_t {
    starved = 1,       ///< a request did not end
    idled = 2,         ///< the link was idle while a chunk waited
    unwanted = 4,      ///< a chunk for the second time, out of its order, or of a request that is over
    unstrict = 8,      ///< a chunk passed one of a more urgent level
    disordered = 16,   ///< a chunk passed one of its level that was before it
    unfair = 32,       ///< a request got more than its bound ahead of another
    wrong_answer = 64  ///< change() or cancel() did not know whether the request waits
};

struct outcome {
    std::uint32_t broken = 0;
    std::vector<chunk> order;
};

template <class Queue, class Promise>
class simulation {
public:
    explicit simulation(const trace& t) : trace_(t), flows_(t.flows), pairs_(t.flows * t.flows) {}

    outcome run() {
        std::uint64_t now = 0;
        std::size_t e = 0;
        for (std::size_t steps = 0; steps < 2000; ++steps) {  // a scheduler that is wrong may not come to an end
            for (; e < trace_.events.size() && trace_.events[e].at <= now; ++e) {
                happen(trace_.events[e]);
            }
            const std::optional<chunk> next = queue_.next();
            if (next) {
                give(*next);
                ++now;
                continue;
            }
            const bool waiting = std::ranges::any_of(flows_, &flow::waits);
            found(idled, waiting);
            if (e == trace_.events.size() && !waiting) {
                break;
            }
            now = waiting || e == trace_.events.size() ? now + 1 : trace_.events[e].at;
        }
        found(starved, std::ranges::any_of(flows_, &flow::waits));
        return std::move(result_);
    }

private:
    struct pair {
        double ahead = 0, least = 0, most = 0, bound = 0;
    };

    void found(broken what, bool is_so) { result_.broken |= is_so ? static_cast<std::uint32_t>(what) : 0u; }

    void happen(const event& e) {
        flow& f = flows_[e.flow];
        if (e.what == event::arrival) {
            f.what = e.now;
            f.arrived = f.came = f.turn = ++clock_;
            queue_.push(e.now);
        } else if (e.what == event::cancellation) {
            found(wrong_answer, queue_.cancel(e.now.id) != f.waits());
            f.cancelled = true;
        } else {
            found(wrong_answer, queue_.change(e.now) != f.waits());
            if (!f.waits()) {
                return;
            }
            const std::uint32_t before = f.level();
            f.what = e.now;
            f.touched = f.level() == before;
            f.came = f.level() == before ? f.came : ++clock_;
        }
        for (std::size_t g = 0; Promise::fair && g < flows_.size(); ++g) {
            meet(e.flow, g);
        }
    }

    /// From here on the two are compared.
    void meet(std::size_t a, std::size_t b) {
        pairs_[std::min(a, b) * flows_.size() + std::max(a, b)] = {0, 0, 0,
                                                                   Promise::bound(Promise::cost(flows_[a]), Promise::cost(flows_[b]))};
    }

    void give(const chunk& c) {
        result_.order.push_back(c);
        const auto at = std::ranges::find_if(flows_, [&](const flow& f) { return f.arrived > 0 && f.what.id == c.request; });
        if (at == flows_.end() || !at->waits() || at->given != c.index) {
            found(unwanted, true);
            return;
        }
        flow& f = *at;
        const auto number = static_cast<std::size_t>(at - flows_.begin());
        for (std::size_t i = 0; i < flows_.size(); ++i) {
            const flow& g = flows_[i];
            if (i == number || !g.waits()) {
                continue;
            }
            if (Promise::levels && g.level() != f.level()) {
                found(unstrict, g.level() < f.level());
                continue;
            }
            found(disordered, !Promise::passes(f, g));
            if (Promise::fair) {
                pair& p = pairs_[std::min(i, number) * flows_.size() + std::max(i, number)];
                p.ahead += number < i ? Promise::cost(f) : -Promise::cost(f);
                p.least = std::min(p.least, p.ahead);
                p.most = std::max(p.most, p.ahead);
                found(unfair, p.most - p.least > p.bound);
            }
        }
        ++f.given;
        f.turn = ++clock_;
        f.touched = true;
    }

    const trace& trace_;
    Queue queue_;
    std::vector<flow> flows_;
    std::vector<pair> pairs_;
    std::uint64_t clock_ = 0;
    outcome result_;
};

template <class Queue, class Promise>
void holds(bool deadlines) {
    std::uint32_t broken = 0;
    std::size_t chunks = 0;
    bool same = true;
    for (std::uint64_t seed = 0; seed < traces; ++seed) {
        const trace t = deadlines ? any_trace(seed) : without_deadlines(any_trace(seed));
        const outcome once = simulation<Queue, Promise>(t).run();
        broken |= once.broken;
        chunks += once.order.size();
        same = same && simulation<Queue, Promise>(t).run().order == once.order;
    }
    CHECK(broken == 0);
    CHECK(same);
    CHECK(chunks > std::size_t{20} * traces);
}

/// What a few hundred traces find wrong.
template <class Queue, class Promise>
std::uint32_t faults() {
    std::uint32_t all = 0;
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
        all |= simulation<Queue, Promise>(any_trace(seed)).run().broken;
    }
    return all;
}

using fifo_queue = scheduler::fifo::queue;
using round_robin_queue = scheduler::round_robin::queue;
using priority_queue = scheduler::priority<3>::queue;
using weighted_fair_queue = scheduler::weighted_fair::queue;

/// A queue that is told of something else than what is wanted.
template <class Queue, class Lie>
struct misinformed : Queue {
    void push(request r) { Queue::push(Lie::about(r)); }
    bool change(request r) { return Queue::change(Lie::about(r)); }
};

struct no_levels {
    static request about(request r) {
        r.level = urgency::on_demand;
        return r;
    }
};
struct no_deadlines {
    static request about(request r) {
        r.deadline = no_deadline;
        return r;
    }
};
struct no_weights {
    static request about(request r) {
        r.weight = 1;
        return r;
    }
};
struct no_bytes {
    static request about(request r) {
        r.chunk_bytes = 1;
        return r;
    }
};

struct forgets_one_in_nine : fifo_queue {
    void push(request r) {
        if (++pushed % 9 != 0) {
            fifo_queue::push(r);
        }
    }
    int pushed = 0;
};

struct pauses : fifo_queue {
    std::optional<chunk> next() { return ++asked % 9 == 0 ? std::nullopt : fifo_queue::next(); }
    int asked = 0;
};

/// Takes up a request that is changed from its beginning.
struct begins_again : priority_queue {
    bool change(request r) {
        const bool waits = cancel(r.id);
        if (waits) {
            push(r);
        }
        return waits;
    }
};

/// Its order depends on what other queues were asked before.
struct has_moods : priority_queue {
    void push(request r) {
        r.deadline = 7 * pushed++ % 10;
        priority_queue::push(r);
    }
    static inline std::uint64_t pushed = 0;
};

struct never_cancels : round_robin_queue {
    bool cancel(std::uint64_t) { return true; }
};

struct newest_first : priority_queue {
    void push(request r) {
        r.level = urgency::on_demand;
        r.deadline = ~++pushed;
        priority_queue::push(r);
    }
    bool change(request r) {
        r.level = urgency::on_demand;
        r.deadline = ~pushed;
        return priority_queue::change(r);
    }
    std::uint64_t pushed = 0;
};

}  // namespace

TEST_CASE("fifo in a simulated clock") { holds<fifo_queue, fifo_promise>(true); }

TEST_CASE("round robin in a simulated clock: of two that wait none is more than a chunk ahead") {
    holds<round_robin_queue, round_robin_promise>(true);
}

TEST_CASE("priority in a simulated clock: levels are strict at every chunk, the earliest deadline first within a level") {
    holds<priority_queue, priority_promise>(true);
}

TEST_CASE("priority in a simulated clock: without deadlines the first to come to a level is first") {
    holds<priority_queue, priority_promise>(false);
}

TEST_CASE("weighted fair in a simulated clock: of two that wait none is more than the cost of a chunk of each ahead") {
    holds<weighted_fair_queue, weighted_fair_promise>(true);
}

TEST_CASE("the simulation finds what is wrong") {
    CHECK(faults<fifo_queue, fifo_promise>() == 0);
    CHECK((faults<forgets_one_in_nine, fifo_promise>() & (starved | idled)) == (starved | idled));
    CHECK(faults<pauses, fifo_promise>() == idled);
    CHECK((faults<begins_again, priority_promise>() & unwanted) == unwanted);
    CHECK((faults<never_cancels, round_robin_promise>() & (unwanted | wrong_answer)) == (unwanted | wrong_answer));
    CHECK((faults<misinformed<priority_queue, no_levels>, priority_promise>() & unstrict) == unstrict);
    CHECK((faults<misinformed<weighted_fair_queue, no_levels>, weighted_fair_promise>() & unstrict) == unstrict);
    CHECK(faults<misinformed<priority_queue, no_deadlines>, priority_promise>() == disordered);
    CHECK(faults<newest_first, fifo_promise>() == disordered);
    CHECK(faults<fifo_queue, round_robin_promise>() == (disordered | unfair));
    CHECK((faults<priority_queue, weighted_fair_promise>() & unfair) == unfair);
    CHECK((faults<misinformed<weighted_fair_queue, no_weights>, weighted_fair_promise>() & unfair) == unfair);
    CHECK((faults<misinformed<weighted_fair_queue, no_bytes>, weighted_fair_promise>() & unfair) == unfair);
    const trace t = any_trace(0);
    CHECK(t.flows > 1);
    CHECK(simulation<has_moods, fifo_promise>(t).run().order != simulation<has_moods, fifo_promise>(t).run().order);
}

namespace {

/// Ticks until an old request has its four chunks, while each tick a newcomer of one chunk comes; or `limit`.
template <class Queue>
std::uint64_t beside_newcomers(std::uint32_t their_weight, std::uint64_t limit) {
    Queue q;
    q.push({0, 4});
    std::uint32_t left = 4;
    for (std::uint64_t now = 1; now < limit; ++now) {
        q.push({.id = now, .chunks = 1, .weight = their_weight});
        const std::optional<chunk> c = q.next();
        REQUIRE(c);
        left -= c->request == 0 ? 1 : 0;
        if (left == 0) {
            return now;
        }
    }
    return limit;
}

}  // namespace

TEST_CASE("newcomers without end starve nobody") {
    CHECK(beside_newcomers<fifo_queue>(64, 100'000) == 4);
    CHECK(beside_newcomers<round_robin_queue>(64, 100'000) < 20);
    // The old one's chunks cost 4, 3, 2 and 1, a newcomer's 1 / weight; each chunk that the old one gets leaves one newcomer more waiting.
    constexpr std::uint64_t newcomers = 4 * 1 + 3 * 2 + 2 * 3 + 1 * 4;
    CHECK(beside_newcomers<weighted_fair_queue>(64, 100'000) <= newcomers * 64 + 4);
    CHECK(beside_newcomers<weighted_fair_queue>(1000, 100'000) <= newcomers * 1000 + 4);
}

TEST_CASE("newcomers whose cost is lost beside a large virtual time starve nobody") {
    weighted_fair_queue q;
    q.push({.id = 1, .chunks = 4, .chunk_bytes = std::uint64_t{1} << 33});
    CHECK(q.next() == chunk{1, 0});  // now it is 2^68, and the next number that a double holds is 2^16 more
    q.push({.id = 2, .chunks = 1, .chunk_bytes = 1 << 10});
    std::uint64_t newcomers = 0;
    do {
        REQUIRE(newcomers < 1000);
        q.push({.id = 3 + newcomers, .chunks = 1});
        ++newcomers;
    } while (q.next()->request != 2);
    CHECK(newcomers <= (1 << 4) + 1);
}
