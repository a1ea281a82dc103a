#include <penstock/stream/load_queue.hpp>

#include <doctest/doctest.h>

#include <map>
#include <vector>

namespace {

using namespace penstock;

struct no_source final : byte_source {
    void read(std::uint32_t, std::uint64_t, std::span<std::byte>) override {}
    std::string name(std::uint32_t) const override { return "nothing"; }
};

struct calls {
    int pushes = 0, changes = 0, cancels = 0, answers = 0;
};

/// Tells what its queue was asked; its answer to change() can be given.
template <class Base, class Tag>
struct noting {
    using policy_axis = axis::scheduling;
    struct queue : Base {
        queue() { seen = {}; }
        void push(request r) {
            ++seen.pushes;
            Base::push(r);
        }
        bool change(request r) requires changeable_queue<Base> {
            ++seen.changes;
            return Base::change(r);
        }
        bool cancel(std::uint64_t id) requires cancellable_queue<Base> {
            ++seen.cancels;
            return Base::cancel(id);
        }
        std::optional<chunk> next() {
            ++seen.answers;
            return Base::next();
        }
    };
    static inline calls seen;
};

/// A user's queue with push() and next() alone.
class plain_queue {
public:
    void push(request r) { queue_.push(r); }
    std::optional<chunk> next() { return queue_.next(); }

private:
    scheduler::priority<3>::queue queue_;
};

class throwing_queue : public plain_queue {
public:
    bool cancel(std::uint64_t) { throw configuration_error("no"); }
};

using full = noting<scheduler::priority<3>::queue, struct full_tag>;
using plain = noting<plain_queue, struct plain_tag>;
using throwing = noting<throwing_queue, struct throwing_tag>;
static_assert(host_scheduler<plain> && !changeable_queue<plain::queue> && !cancellable_queue<plain::queue>);
static_assert(host_scheduler<full> && changeable_queue<full::queue> && cancellable_queue<full::queue>);

/// A load of requests with four chunks each.
std::shared_ptr<detail::load_state> load_of(std::vector<std::pair<std::uint64_t, urgency>> requests) {
    static no_source source;
    static std::byte place[2 * 512];
    std::vector<transfer> list;
    for (const auto& [id, level] : requests) {
        list.push_back({.request = id, .bytes = 512, .destination = place + 512 * list.size(), .level = level});
    }
    return std::make_shared<detail::load_state>(transfer_plan(std::span<const transfer>(list), chunking::fixed<bytes{128}>{}).take(),
                                                source, on_host(), progress_callback{}, std::stop_token{});
}

using given = std::map<std::pair<std::uint64_t, std::uint32_t>, int>;  // how often, by request and chunk

template <class Queue>
given drain(Queue& q) {
    given all;
    while (!q.empty()) {
        const detail::chunk_job j = q.next();
        REQUIRE(j.load);
        const planned_chunk& c = j.load->chunks[j.chunk];
        ++all[{j.load->requests[c.request].what.id, c.index}];
    }
    return all;
}

given four_of(std::uint64_t id) { return {{{id, 0}, 1}, {{id, 1}, 1}, {{id, 2}, 1}, {{id, 3}, 1}}; }

}  // namespace

TEST_CASE_TEMPLATE("a promoted request goes on where it was, whatever the queue offers", Scheduler, full, plain) {
    detail::load_queue<Scheduler> q;
    const auto load = load_of({{1, urgency::background}, {2, urgency::prefetch}});
    q.push(load);
    CHECK(q.next().chunk == 4);
    CHECK(q.promote(*load, 0));
    CHECK_FALSE(q.promote(*load, 0));
    std::vector<std::uint32_t> order;
    while (!q.empty()) {
        order.push_back(q.next().chunk);
    }
    CHECK(order == std::vector<std::uint32_t>{0, 1, 2, 3, 5, 6, 7});
    constexpr bool knows = changeable_queue<typename Scheduler::queue>;
    CHECK(Scheduler::seen.changes == (knows ? 1 : 0));
    CHECK(Scheduler::seen.pushes == (knows ? 2 : 3));
    CHECK(Scheduler::seen.answers == 8);
}

TEST_CASE_TEMPLATE("what fails is no longer named, or passed over", Scheduler, full, plain, throwing) {
    detail::load_queue<Scheduler> q;
    const auto dead = load_of({{1, urgency::on_demand}});
    const auto alive = load_of({{2, urgency::on_demand}});
    q.push(dead);
    q.push(alive);
    static_cast<void>(q.next());
    q.fail(*dead, std::make_exception_ptr(cancelled("enough")));
    CHECK(drain(q) == four_of(2));
    constexpr bool knows = std::is_same_v<Scheduler, full>;
    CHECK(Scheduler::seen.answers == 1 + 4 + (knows ? 0 : 3));
    CHECK(Scheduler::seen.cancels == (cancellable_queue<typename Scheduler::queue> ? 1 : 0));
}

TEST_CASE_TEMPLATE("loads that share a request's number: neither changes nor cancels the other's", Scheduler, full, plain) {
    detail::load_queue<Scheduler> q;
    const auto one = load_of({{1, urgency::background}});
    const auto other = load_of({{1, urgency::background}});
    const auto between = load_of({{2, urgency::prefetch}});
    q.push(one);
    q.push(other);
    q.push(between);
    CHECK(q.promote(*other, 0));
    for (int i = 0; i < 4; ++i) {
        CHECK(q.next().load == other);
    }
    CHECK(q.next().load == between);
    q.fail(*between, std::make_exception_ptr(cancelled("enough")));
    CHECK(Scheduler::seen.changes == 0);
    const auto third = load_of({{1, urgency::background}});
    q.push(third);
    q.fail(*one, std::make_exception_ptr(cancelled("enough")));
    CHECK(drain(q) == four_of(1));
    CHECK(third->untaken[0].all == 0);
}

TEST_CASE("of loads that share a request's number the one that is due sooner gets the chunk") {
    detail::load_queue<full> q;
    const auto late = load_of({{1, urgency::on_demand}});
    const auto soon = load_of({{1, urgency::on_demand}});
    soon->requests[0].what.deadline = 5;
    q.push(late);
    q.push(soon);
    for (int i = 0; i < 4; ++i) {
        CHECK(q.next().load == soon);
    }
    CHECK(drain(q) == four_of(1));
}
