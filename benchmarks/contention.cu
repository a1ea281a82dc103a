// What requests wait for one another on the way to one GPU: experts of 42 MiB from pinned memory, in whole copies and in chunks, under each
// scheduler. A wait is from the request to the event of its last byte. Usage: benchmark_contention [--samples N] [--json FILE]
//
//   link            one copy of 1 GiB, and chunks without a weight stream: what the rest is a part of
//   utilisation     72 experts queued, not on demand, so that every chunk passes the window
//   five and one    5 experts wanted at once and an urgent one in their middle; all of them wait their turn, so that the scheduler decides
//   saturated       an urgent expert while prefetching never ends; held to its own time on an idle link and two chunks
//   round robin     5 experts at once: the time between the first and the last that is whole
//   governor        a kernel that reads an expert from host memory, 30 % of the link, Poisson, beside prefetching without end
//   queue           push and next of a scheduler with 1000 requests outstanding, 10^6 times on one core

#include "contention/bench.hpp"

#include <ctime>
#include <memory>

using namespace contention_benchmark;

namespace {

// ---- the link

void link_rows(bench& b) {
    b.out.group("link: bytes / microsecond (= MB/s), and the part of one large copy");
    const ps::stream s(0);
    ps::event end;
    const auto copies = [&](std::uint64_t size, bool marked) {
        std::vector<double> rates;
        std::vector<ps::event> events(experts * expert_bytes / size);
        for (int round = 0; round < 12; ++round) {
            const auto begin = clock_type::now();
            std::size_t n = 0;
            for (std::uint64_t at = 0; at + size <= b.from.size(); at += size) {
                ps::check(cudaMemcpyAsync(b.to.data() + at, b.from.data() + at, size, cudaMemcpyHostToDevice, s.get()), "cudaMemcpyAsync");
                if (marked) {
                    events[n++].record(s.get());
                }
            }
            arrive(s, end);
            rates.push_back(static_cast<double>(b.from.size() / size * size) / microseconds_since(begin));
        }
        return median(rates);
    };
    b.link = copies(b.from.size(), false);
    b.out.row("one copy", {{"MB/s", b.link}, {"part", 1}});
    for (const ps::bytes chunk : chunk_sizes) {
        const double plain = copies(chunk, false), marked = copies(chunk, true);
        b.out.row("copies of " + name(chunk), {{"MB/s", plain}, {"part", plain / b.link}, {"with_events", marked / b.link}});
    }
}

// ---- utilisation

template <class Scheduler>
void utilisation(bench& b, const std::string& scheduler) {
    for (const ps::bytes chunk : chunk_sizes) {
        stream_of<Scheduler> loader({}, {chunk});
        const ps::stream way(0);
        ps::event end;
        const std::vector<ps::transfer> list = b.all(ps::urgency::prefetch);
        std::vector<double> parts;
        for (int round = 0; round < 7; ++round) {
            const auto begin = clock_type::now();
            std::vector<ps::ticket> loads;
            for (int i = 0; i < 3; ++i) {
                loads.push_back(loader.start(list, b.nothing, ps::on_device(0, way.get())));
            }
            double moved = 0;
            for (ps::ticket& load : loads) {
                load.wait();
                moved += static_cast<double>(load.report().bytes);
            }
            arrive(way, end);
            parts.push_back(moved / microseconds_since(begin) / b.link);
        }
        const double must = chunk == 8_MiB ? 0.97 : chunk == 4_MiB ? 0.955 : chunk == 2_MiB ? 0.92 : 0;
        b.out.row(scheduler + ", " + name(chunk), {{"part", median(parts)}, {"+-", load_benchmark::spread(parts)}}, must > 0 ? "part" : "",
                  must, false);
    }
}

// ---- five and one

template <class Scheduler>
void five_and_one(bench& b, const std::string& scheduler) {
    for (const ps::bytes chunk : chunk_sizes) {
        stream_of<Scheduler> loader({.on_demand_waits = true}, {chunk});
        const ps::stream way(0), urgent_way(0);
        ps::event end;
        std::vector<double> urgent_waits, last_waits;
        for (std::uint32_t i = 0; i < std::max(20u, b.samples / 10); ++i) {
            const auto begin = clock_type::now();
            std::vector<ps::ticket> five;
            for (std::uint32_t n = 0; n < 5; ++n) {
                const ps::transfer t = b.expert(n, ps::urgency::prefetch, n);
                five.push_back(loader.start(std::span(&t, 1), b.nothing, ps::on_device(0, way.get())));
            }
            while (microseconds_since(begin) < 2000) {
            }
            const ps::transfer t = b.expert(experts - 1, ps::urgency::on_demand, 1000);
            const auto asked = clock_type::now();
            ps::ticket urgent = loader.start(std::span(&t, 1), b.nothing, ps::on_device(0, urgent_way.get()));
            urgent.wait();
            arrive(urgent_way, end);
            urgent_waits.push_back(microseconds_since(asked));
            for (ps::ticket& load : five) {
                load.wait();
            }
            arrive(way, end);
            last_waits.push_back(microseconds_since(begin));
        }
        b.out.row(scheduler + ", " + name(chunk),
                  {{"urgent_us", median(urgent_waits)}, {"p99", percentile(urgent_waits, 0.99)}, {"last_of_five_us", median(last_waits)}});
        b.out.samples(scheduler + ", " + name(chunk), urgent_waits);
    }
}

// ---- saturated

template <class Scheduler>
void saturated(bench& b, const std::string& scheduler, bool held, ps::stream_options how = {}) {
    for (const ps::bytes chunk : chunk_sizes) {
        stream_of<Scheduler> loader(how, {chunk});
        const ps::stream way(0);
        ps::event end;
        std::vector<double> one_chunk;
        for (int i = 0; i < 100; ++i) {
            const auto begin = clock_type::now();
            ps::check(cudaMemcpyAsync(b.to.data(), b.from.data(), chunk, cudaMemcpyHostToDevice, way.get()), "cudaMemcpyAsync");
            arrive(way, end);
            one_chunk.push_back(microseconds_since(begin));
        }
        const double own = median(urgent_waits(b, loader, 200, 50));
        std::vector<double> waits;
        {
            saturation<stream_of<Scheduler>> prefetching(b, loader);
            while (!prefetching.begun) {
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            waits = urgent_waits(b, loader, held ? b.samples : b.samples / 10, 400);
        }
        const double limit = own + 2 * median(one_chunk);
        b.out.row(scheduler + ", " + name(chunk),
                  {{"own_us", own},
                   {"chunk_us", median(one_chunk)},
                   {"median", median(waits)},
                   {"p99", percentile(waits, 0.99)},
                   {"max", percentile(waits, 1)}},
                  held ? "p99" : "", limit);
        b.out.samples(scheduler + ", " + name(chunk), waits);
    }
}

// ---- round robin

void round_robin(bench& b) {
    for (const ps::bytes chunk : chunk_sizes) {
        stream_of<ps::scheduler::round_robin> loader({}, {chunk});
        std::vector<ps::stream> ways;
        for (int n = 0; n < 5; ++n) {
            ways.emplace_back(0);
        }
        std::vector<double> apart;
        double chunk_us = static_cast<double>(chunk.count) / b.link + 3;
        for (int i = 0; i < 60; ++i) {
            std::vector<ps::ticket> loads;
            for (std::uint32_t n = 0; n < 5; ++n) {
                const ps::transfer t = b.expert(n, ps::urgency::prefetch, n);
                loads.push_back(loader.start(std::span(&t, 1), b.nothing, ps::on_device(0, ways[n].get())));
            }
            std::vector<clock_type::time_point> ends(5);
            std::vector<ps::event> end(5);
            for (std::size_t n = 0; n < 5; ++n) {  // they end in this order; the copies are enqueued one or two chunks before
                loads[n].wait();
                end[n].record(ways[n].get());
            }
            for (std::size_t there = 0; there < 5;) {
                for (std::size_t n = 0; n < 5; ++n) {
                    if (ends[n] == clock_type::time_point{} && end[n].ready()) {
                        ends[n] = clock_type::now();
                        ++there;
                    }
                }
            }
            const auto [first, last] = std::ranges::minmax(ends);
            apart.push_back(std::chrono::duration<double, std::micro>(last - first).count());
        }
        b.out.row("round robin, " + name(chunk), {{"apart_us", median(apart)}, {"p90", percentile(apart, 0.9)}, {"chunk_us", chunk_us}},
                  "apart_us", 4 * chunk_us);
    }
}

// ---- governor

/// Reads `count` values of host memory, and says so.
__global__ void __launch_bounds__(256)
    miss(const uint4* from, std::uint64_t count, ps::miss_word word, std::uint32_t* ended, std::uint32_t* sink) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        word.post(count * sizeof(uint4));
    }
    std::uint32_t sum = 0;
    constexpr std::uint32_t loads = 8;
    const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
    for (std::uint64_t at = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; at < count; at += loads * step) {
        uint4 v[loads];
#pragma unroll
        for (std::uint32_t i = 0; i < loads; ++i) {
            v[i] = at + i * step < count ? __ldcs(from + at + i * step) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (std::uint32_t i = 0; i < loads; ++i) {
            sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
    }
    if (sum == 0x9e3779b9u) {
        *sink = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(ended, 1) + 1 == gridDim.x) {
        *ended = 0;
        word.post(0);
    }
}

template <class Scheduler>
void governed(bench& b, const std::string& what, ps::bytes chunk, bool held) {
    ps::link_watch watch;
    stream_of<Scheduler> loader({.watch = &watch}, {chunk});
    const ps::stream way(0);
    ps::buffer<std::uint32_t, ps::memory::device> words(2);
    ps::check(cudaMemset(words.data(), 0, 8), "cudaMemset");
    const auto launch = [&] {
        miss<<<64, 256, 0, way.get()>>>(reinterpret_cast<const uint4*>(b.from.data() + (experts - 1) * expert_bytes),
                                        expert_bytes / sizeof(uint4), watch.misses(), words.data(), words.data() + 1);
        ps::check(cudaGetLastError(), "miss");
    };
    std::vector<std::pair<ps::timed_event, ps::timed_event>> events(b.samples);
    const auto times = [&](std::uint32_t count) {
        std::vector<double> us;
        for (std::uint32_t i = 0; i < count; ++i) {
            us.push_back(static_cast<double>(events[i].second.milliseconds_since(events[i].first)) * 1000);
        }
        return us;
    };
    const auto one = [&](std::uint32_t i) {
        events[i].first.record(way.get());
        launch();
        events[i].second.record(way.get());
    };
    for (std::uint32_t i = 0; i < 50; ++i) {
        one(i);
        way.synchronize();
    }
    const double idle = median(times(50));
    double seconds = 0;
    std::uint64_t moved = 0;
    {
        saturation<stream_of<Scheduler>> prefetching(b, loader);
        while (!prefetching.begun) {
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::mt19937 random(11);
        std::exponential_distribution<double> apart(0.3 / (expert_bytes / b.link));
        const std::uint64_t before = prefetching.bytes();
        const auto begin = clock_type::now();
        double next = 0;
        for (std::uint32_t i = 0; i < b.samples; ++i) {
            next += apart(random);
            while (microseconds_since(begin) < next) {
            }
            one(i);
        }
        way.synchronize();
        seconds = microseconds_since(begin) / 1e6;
        moved = prefetching.bytes() - before;
    }
    const std::vector<double> waits = times(b.samples);
    const double left = b.link * seconds * 1e6 - static_cast<double>(b.samples) * expert_bytes;
    const double p99 = percentile(waits, 0.99) / idle, background = static_cast<double>(moved) / left;
    b.out.row(what + ", " + name(chunk) + ", misses", {{"idle_us", idle}, {"median", median(waits) / idle}, {"p99", p99}},
              held ? "p99" : "", 1.3);
    b.out.row(what + ", " + name(chunk) + ", background", {{"part_of_what_is_left", background}}, held ? "part_of_what_is_left" : "", 0.7,
              false);
    b.out.samples(what + ", " + name(chunk), waits);
}

// ---- the queue

template <class Scheduler>
void queue_row(bench& b, const std::string& scheduler) {
    typename Scheduler::queue q;
    std::mt19937 random(3);
    std::uint64_t id = 0;
    const auto any = [&] {
        return ps::request{.id = id++,
                           .chunks = 1,
                           .level = static_cast<ps::urgency>(random() % 3),
                           .deadline = random() % 1000,
                           .weight = 1 + static_cast<std::uint32_t>(random() % 64),
                           .chunk_bytes = 1 + random() % (8u << 20)};
    };
    for (int i = 0; i < 1000; ++i) {
        q.push(any());
    }
    std::vector<double> times(1'000'000);
    for (double& t : times) {
        const ps::request r = any();
        const auto begin = clock_type::now();
        q.push(r);
        const bool got = q.next().has_value();
        t = microseconds_since(begin);
        if (!got) {
            throw ps::error("the queue is empty");
        }
    }
    double sum = 0;
    for (const double t : times) {
        sum += t;
    }
    b.out.row(scheduler + ", mean", {{"us", sum / 1e6}}, "us", 1);
    b.out.row(scheduler + ", p99", {{"us", percentile(times, 0.99)}}, "us", 5);
}

void all_rows(bench& b) {
    using priority = ps::scheduler::priority<3>;
    using adaptive = ps::throttled<priority, ps::governor::adaptive>;
    link_rows(b);
    b.out.group("utilisation: part of one large copy");
    utilisation<ps::scheduler::fifo>(b, "fifo");
    utilisation<ps::scheduler::round_robin>(b, "round robin");
    utilisation<priority>(b, "priority");
    utilisation<ps::scheduler::weighted_fair>(b, "weighted fair");
    utilisation<adaptive>(b, "priority, adaptive");
    b.out.group("saturated: an urgent expert beside prefetching without end, microseconds");
    saturated<priority>(b, "priority", true);
    saturated<adaptive>(b, "priority, adaptive", true);
    saturated<priority>(b, "priority, waits its turn", false, {.on_demand_waits = true});
    b.out.group("five and one: an urgent expert in the middle of five, microseconds");
    five_and_one<ps::scheduler::fifo>(b, "fifo");
    five_and_one<ps::scheduler::round_robin>(b, "round robin");
    five_and_one<priority>(b, "priority");
    five_and_one<ps::scheduler::weighted_fair>(b, "weighted fair");
    b.out.group("round robin: five experts at once, the first whole to the last, microseconds");
    round_robin(b);
    b.out.group("governor: a kernel's misses beside prefetching without end, parts of its time on an idle link");
    governed<priority>(b, "none", 2_MiB, false);
    for (const ps::bytes chunk : {8_MiB, 4_MiB, 2_MiB, 1_MiB}) {
        governed<adaptive>(b, "adaptive", chunk, chunk <= 2_MiB);
    }
    b.out.group("queue: push and next at 1000 requests outstanding, microseconds");
    queue_row<ps::scheduler::fifo>(b, "fifo");
    queue_row<ps::scheduler::round_robin>(b, "round robin");
    queue_row<priority>(b, "priority");
    queue_row<ps::scheduler::weighted_fair>(b, "weighted fair");
}

std::string version(int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }

void facts(table& out) {
    cudaDeviceProp gpu{};
    int driver = 0, runtime = 0;
    ps::check(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
    ps::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    ps::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    const std::time_t now = std::time(nullptr);
    char date[32];
    std::strftime(date, sizeof date, "%F", std::gmtime(&now));
    std::ifstream module("/proc/driver/nvidia/version");
    std::string line;
    std::getline(module, line);
    out.fact("date", date);
    out.fact("GPU", gpu.name);
    out.fact("driver",
             (line.empty() ? "" : line.substr(line.find_first_not_of(' ', line.find(':') + 1)) + ", ") + "CUDA " + version(driver));
    out.fact("CUDA", version(runtime));
    out.fact("host", std::to_string(ps::usable_cores()) + " cores");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (ps::device_count() == 0) {
            std::puts("benchmark_contention: there is no GPU here");
            return 77;
        }
        bench b;
        std::string json;
        for (int i = 1; i + 1 < argc; i += 2) {
            const std::string option = argv[i];
            if (option == "--samples") {
                b.samples = static_cast<std::uint32_t>(std::stoul(argv[i + 1]));
            } else if (option == "--json") {
                json = argv[i + 1];
            } else {
                throw ps::configuration_error("unknown option " + option);
            }
        }
        facts(b.out);
        all_rows(b);
        if (!json.empty()) {
            b.out.write(json);
        }
    } catch (const std::exception& e) {
        std::fprintf(stderr, "benchmark_contention: %s\n", e.what());
        return 1;
    }
    return 0;
}
