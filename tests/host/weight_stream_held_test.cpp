#include "stream_fakes.hpp"

#include <atomic>
#include <future>

using namespace stream_fakes;

/// What must not stand still, or fall, when a device, a disk or a callback is held up.

namespace {

template <class Scheduler = scheduler::fifo, class Link = slow_link>
struct rig {
    using engine = detail::stream_engine<as_if_pinned, Scheduler, Link>;
    std::shared_ptr<engine> e;
    template <class... A>
    explicit rig(A... a) : e(std::make_shared<engine>(a...)) {}
    ticket go(const std::vector<transfer>& list, byte_source& source, place where, std::uint64_t chunk, progress_callback call = nullptr) {
        transfer_plan plan(std::span<const transfer>(list), chunking::run_time{bytes{chunk}});
        auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, std::move(call), std::stop_token{});
        e->start(load);
        return ticket(e, std::move(load));
    }
};

place on(slow_copies& d) { return on_device(0, reinterpret_cast<cudaStream_t>(&d)); }

template <class F>
bool within(std::chrono::milliseconds time, F f) {
    for (const auto end = std::chrono::steady_clock::now() + time; std::chrono::steady_clock::now() < end;) {
        if (f()) {
            return true;
        }
        std::this_thread::sleep_for(1ms);
    }
    return f();
}

std::atomic<std::byte*> refuse{nullptr};

/// Does not copy to one place.
struct refusing_link : slow_link {
    static void copy(const place& where, std::byte* to, const std::byte* from, std::uint64_t size) {
        if (to == refuse) {
            throw cuda_error(cudaErrorInvalidValue, "refused");
        }
        slow_link::copy(where, to, from, size);
    }
};

}  // namespace

TEST_CASE("readers that sleep are woken by what one of them leaves behind, while it serves a window") {
    slow_copies held;
    held.allow(0);
    slow_source disk, quick;
    disk.at_a_time = 1;
    disk.allow(1);
    rig<> r(4, std::size_t{1000}, 8u, -1, 1u);
    std::vector<std::byte> a(4000), b(1000);
    ticket ta = r.go({from_file(1, 1, 0, a, urgency::prefetch)}, disk, on(held), 1000);
    held.wait_for_enqueued(1);
    disk.wait_for_reads(2);
    std::this_thread::sleep_for(50ms);
    ticket tb = r.go({from_file(1, 1, 0, b)}, quick, on_host(), 1000);
    std::this_thread::sleep_for(50ms);
    disk.allow(100);
    CHECK(within(2s, [&] { return tb.done(); }));
    held.allow(1000);
    ta.wait();
    tb.wait();
    slow_link::finish(on(held));
    r.e->stop();
}

TEST_CASE("readers go on while a callback of the user takes its time") {
    slow_source disk(5ms);  // long enough for who finds nothing to do to fall asleep
    disk.at_a_time = 1;
    disk.allow(2);
    rig<> r(4, std::size_t{1000}, 8u, -1, 1u);
    std::vector<std::byte> a(6000);
    std::atomic<bool> go{false};
    std::atomic<int> calls{0};
    ticket ta = r.go({from_file(1, 1, 0, a)}, disk, on_host(), 1000, [&](const progress&) {
        if (++calls == 2)
            while (!go)
                std::this_thread::sleep_for(1ms);
    });
    std::this_thread::sleep_for(50ms);
    disk.allow(100);
    // calls: the second blocks; with other readers awake the third read goes on, and all others after it
    const bool all = within(2s, [&] { return disk.reads().size() == 6; });
    CHECK(all);
    go = true;
    ta.wait();
    r.e->stop();
}

namespace {

/// Cancels a load of one chunk larger than a slot, all whose readers wait for a device that is held up.
void cancel_beside_a_held_device(int readers, std::uint32_t slots, urgency level) {
    slow_copies held;
    held.allow(0);
    slow_source s;
    rig<> r(readers, std::size_t{1000}, slots, -1, 1u);
    std::vector<std::byte> a(9000);
    auto t = std::make_unique<ticket>(r.go({from_file(1, 1, 0, a, level)}, s, on(held), 9000));
    held.wait_for_enqueued(1);
    std::this_thread::sleep_for(100ms);
    auto f = std::async(std::launch::async, [&] { t.reset(); });
    CHECK(f.wait_for(2s) == std::future_status::ready);
    held.allow(100);
    f.get();
    slow_link::finish(on(held));
    r.e->stop();
}

}  // namespace

TEST_CASE("cancelling does not wait for a held-up device where the only reader waits for a slot") {
    cancel_beside_a_held_device(1, 1, urgency::on_demand);
}

TEST_CASE("cancelling does not wait for a held-up device where one reader serves its window and one waits for a slot") {
    cancel_beside_a_held_device(2, 3, urgency::prefetch);
}

TEST_CASE("a slot that was not used does not stand for the stream that it served before") {
    slow_copies one, two;
    slow_source s, bad;
    bad.broken_file = 9;
    rig<> r(3, std::size_t{1000}, 2u, -1);
    std::vector<std::byte> a(2000), b(1000), c(1000), d(1000);
    one.allow(0);
    {
        ticket t = r.go({from_file(1, 1, 0, a)}, s, on(one), 1000);
        t.wait();
        one.allow(2);
        slow_link::finish(on(one));
    }
    ticket tb = r.go({from_file(1, 1, 0, b)}, s, on(one), 1000);
    tb.wait();
    {
        ticket tc = r.go({from_file(1, 9, 0, c)}, bad, on(two), 1000);
        CHECK_THROWS(tc.wait());
    }
    ticket td = r.go({from_file(1, 1, 0, d)}, s, on(two), 1000);
    CHECK(within(2s, [&] { return td.done(); }));
    one.allow(100);
    td.wait();
    slow_link::finish(on(one));
    slow_link::finish(on(two));
    r.e->stop();
}

TEST_CASE("a slot is not filled again while a copy of a half enqueued chunk runs out of it") {
    slow_copies dev;
    dev.allow(0);
    slow_source s;
    rig<scheduler::fifo, refusing_link> r(2, std::size_t{1000}, 1u, -1);
    std::vector<std::byte> a(2000), b(1000);
    refuse = a.data() + 1000;
    {
        ticket t =
            r.go({from_file(1, 1, 0, std::span(a).first(300)), from_file(1, 1, 300, std::span(a).subspan(1000, 300))}, s, on(dev), 1000);
        CHECK_THROWS(t.wait());
    }
    ticket t = r.go({from_file(1, 2, 0, b)}, s, on(dev), 1000);
    std::this_thread::sleep_for(20ms);
    CHECK_FALSE(t.done());  // the only slot still holds what is being copied
    dev.allow(100);
    t.wait();
    slow_link::finish(on(dev));
    CHECK(tests::holds(std::span(a).first(300), 1, 0));
    r.e->stop();
}

TEST_CASE("a callback dies without the lock of the stream") {
    auto* rp = new rig<>(2, std::size_t{1000}, 2u, -1);
    struct asks {
        std::shared_ptr<rig<>::engine> e;
        ~asks() {
            if (e)
                static_cast<void>(e->staging_bytes());
        }
    };
    slow_source s;
    std::atomic<int> i{0};
    std::atomic<bool> over{false};
    std::thread t([&] {
        for (; i < 2000; ++i) {
            std::vector<std::byte> a(100);
            auto x = std::make_shared<asks>();
            x->e = rp->e;
            ticket t = rp->go({from_file(1, 1, 0, a)}, s, on_host(), 1000, [x](const progress&) {});
            x.reset();
            t.wait();
        }
        over = true;
    });
    const bool ok = within(20s, [&] { return over.load(); });
    CHECK(ok);
    if (!ok) {
        std::_Exit(3);  // a deadlock cannot be left otherwise
    }
    t.join();
    rp->e->stop();
    delete rp;
}

TEST_CASE("staging lives until the copies of a half enqueued chunk are over") {
    slow_copies dev;
    dev.allow(0);
    slow_source s;
    std::vector<std::byte> a(2000);
    std::jthread later;
    {
        rig<scheduler::fifo, refusing_link> r(2, std::size_t{1000}, 1u, -1);
        refuse = a.data() + 1000;
        {
            ticket t = r.go({from_file(1, 1, 0, std::span(a).first(300)), from_file(1, 1, 300, std::span(a).subspan(1000, 300))}, s,
                            on(dev), 1000);
            CHECK_THROWS(t.wait());
        }
        r.e->stop();
        later = std::jthread([&] {
            std::this_thread::sleep_for(20ms);
            dev.allow(100);
        });
    }  // waits
    slow_link::finish(on(dev));
    CHECK(tests::holds(std::span(a).first(300), 1, 0));
}

TEST_CASE("a chunk is not opened behind the copies of a held-up stream while another stream's slot is in a reader's hands") {
    for (const int readers : {2, 3, 6}) {
        slow_copies held, other;
        held.allow(0);
        slow_source source, gated;
        gated.allow(0);
        rig<> r(readers, std::size_t{1000}, 2u, -1);
        std::vector<std::byte> a(1000), b(4000);
        ticket ta = r.go({from_file(1, 1, 0, a)}, source, on(held), 1000);
        ta.wait();
        ticket tb = r.go({from_file(1, 1, 0, b)}, gated, on(other), 1000);
        gated.wait_for_reads(1);
        std::this_thread::sleep_for(20ms);
        gated.allow(100);
        CHECK(within(2s, [&] { return tb.done(); }));
        held.allow(100);
        tb.wait();
        slow_link::finish(on(held));
        slow_link::finish(on(other));
        r.e->stop();
    }
}

TEST_CASE("a host load goes on when the device's load that it stood behind is cancelled") {
    slow_copies held;
    held.allow(0);
    slow_source source;
    rig<scheduler::priority<3>> r(6, std::size_t{1000}, 2u, -1);
    std::vector<std::byte> a(9000), b(1000);
    auto t = std::make_unique<ticket>(r.go({from_file(1, 1, 0, a, urgency::background)}, source, on(held), 1000));
    std::this_thread::sleep_for(20ms);
    ticket tb = r.go({from_file(1, 1, 0, b)}, source, on_host(), 1000);
    t.reset();
    CHECK(within(2s, [&] { return tb.done(); }));
    held.allow(100);
    tb.wait();
    slow_link::finish(on(held));
    r.e->stop();
}
