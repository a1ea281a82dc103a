#include "../fault_injection.hpp"
#include "../tiny_model.hpp"
#include "gpu_work.hpp"

#include <penstock/residency/expert_store.hpp>
#include <penstock/stream/load_sharded.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>

#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

/// The calls of the runtime that allocate and lock, under the rules and in the books of the test. The linker puts these in the place of the
/// runtime's (`--wrap`, see tests/CMakeLists.txt), so what is tested is the library as it is.

namespace {

using namespace penstock;
using namespace penstock::literals;
using faults::anonymous_memory;
using faults::had_by;
using faults::ledger;

std::atomic<ledger*> device_books{nullptr};
std::atomic<ledger*> pinned_books{nullptr};

/// Keeps books of device and page-locked memory while it lives. What is in them was taken within its life.
struct books {
    ledger device, pinned;

    books() {
        device_books = &device;
        pinned_books = &pinned;
    }
    books(const books&) = delete;
    books& operator=(const books&) = delete;
    ~books() {
        device_books = nullptr;
        pinned_books = nullptr;
    }
    [[nodiscard]] bool clean() const { return device.clean() && pinned.clean(); }
};

template <class Call>
cudaError_t take(ledger* in, had_by way, std::size_t size, Call call) {
    return in == nullptr || in->grants(way, size) ? call() : cudaErrorMemoryAllocation;
}

}  // namespace

extern "C" {
cudaError_t __real_cudaMalloc(void** p, std::size_t size);                       // NOLINT: the linker's names
cudaError_t __real_cudaFree(void* p);                                            // NOLINT
cudaError_t __real_cudaHostAlloc(void** p, std::size_t size, unsigned flags);    // NOLINT
cudaError_t __real_cudaFreeHost(void* p);                                        // NOLINT
cudaError_t __real_cudaHostRegister(void* p, std::size_t size, unsigned flags);  // NOLINT
cudaError_t __real_cudaHostUnregister(void* p);                                  // NOLINT

cudaError_t __wrap_cudaMalloc(void** p, std::size_t size) {  // NOLINT
    ledger* in = device_books;
    const cudaError_t code = take(in, had_by::allocating, size, [&] { return __real_cudaMalloc(p, size); });
    if (in != nullptr && code == cudaSuccess) {
        in->took(had_by::allocating, *p, size);
    }
    return code;
}
cudaError_t __wrap_cudaFree(void* p) {  // NOLINT
    if (ledger* in = device_books; in != nullptr && p != nullptr) {
        in->gave_back(had_by::allocating, p);  // before another thread can be given the address
    }
    return __real_cudaFree(p);
}
cudaError_t __wrap_cudaHostAlloc(void** p, std::size_t size, unsigned flags) {  // NOLINT
    ledger* in = pinned_books;
    const cudaError_t code = take(in, had_by::allocating, size, [&] { return __real_cudaHostAlloc(p, size, flags); });
    if (in != nullptr && code == cudaSuccess) {
        in->took(had_by::allocating, *p, size);
    }
    return code;
}
cudaError_t __wrap_cudaFreeHost(void* p) {  // NOLINT
    if (ledger* in = pinned_books; in != nullptr && p != nullptr) {
        in->gave_back(had_by::allocating, p);
    }
    return __real_cudaFreeHost(p);
}
cudaError_t __wrap_cudaHostRegister(void* p, std::size_t size, unsigned flags) {  // NOLINT
    ledger* in = pinned_books;
    const cudaError_t code = take(in, had_by::locking, size, [&] { return __real_cudaHostRegister(p, size, flags); });
    if (in != nullptr && code == cudaSuccess) {
        in->took(had_by::locking, p, size);
    }
    return code;
}
cudaError_t __wrap_cudaHostUnregister(void* p) {  // NOLINT
    if (ledger* in = pinned_books; in != nullptr) {
        in->gave_back(had_by::locking, p);
    }
    return __real_cudaHostUnregister(p);
}
}  // extern "C"

namespace {

/// A list of `tensors` equal parts of a file.
tensor_list parts_of(const std::filesystem::path& path, std::uint64_t tensors) {
    const std::uint64_t each = std::filesystem::file_size(path) / tensors;
    tensor_list list{{path}, {}};
    for (std::uint64_t i = 0; i < tensors; ++i) {
        list.tensors.push_back({std::to_string(i), dtype::u8, {each}, 0, i * each, each});
    }
    return list;
}

bool arrived(const tensor_list& list, const loaded_tensors& loaded, std::uint64_t which = 0) {
    return std::all_of(list.tensors.begin(), list.tensors.end(), [&](const tensor_info& t) {
        return tests::holds(tests::from_device(loaded[t.name].data, t.bytes), which, t.offset);
    });
}

/// One step of a store whose model has one layer; every record must hold its expert's bytes.
template <class Store>
void run_step(Store& store, const tests::tiny_model& tiny, const std::vector<bool>& wanted, cudaStream_t consumer) {
    std::vector<std::uint32_t> offsets{0};
    for (const bool w : wanted) {
        offsets.push_back(offsets.back() + w);
    }
    auto step = store.begin(0, offsets, consumer);
    std::vector<std::pair<std::uint32_t, std::vector<std::byte>>> seen;
    for (auto ready = step.next(); !ready.empty(); ready = step.next()) {
        for (const expert_work& w : ready) {
            std::vector<std::byte>& copy = seen.emplace_back(w.expert, std::vector<std::byte>(tiny.model.record_bytes())).second;
            check(cudaMemcpyAsync(copy.data(), w.record, copy.size(), cudaMemcpyDefault, consumer), "cudaMemcpyAsync");
        }
    }
    step.finish();
    check(cudaStreamSynchronize(consumer), "cudaStreamSynchronize");
    CHECK(seen.size() == offsets.back());
    for (const auto& [expert, copy] : seen) {
        CHECK(tiny.is_record(0, expert, copy.data()));
    }
}

using small_chunks = chunking::fixed<1_MiB>;
using few = prefetch::depth<4>;

}  // namespace

TEST_CASE("M01 what is pinned is what is asked for, to the page") {
    std::vector<std::uint64_t> sizes{129_MiB + 512_KiB, 9_MiB, 5'000'001, 1};
    if (std::getenv("PENSTOCK_TEST_BIG") != nullptr) {
        sizes.push_back(2_GiB + 256_MiB);
    }
    books b;
    for (const std::uint64_t size : sizes) {
        {
            const arena a(size, {.device = 0});
            CHECK(b.pinned.bytes() - size < 4096);
            CHECK(b.pinned.bytes() <= arena::bytes_needed(size));
        }
        const buffer<std::byte> exact(size);
        CHECK(b.pinned.bytes() == size);
    }
    std::vector<buffer<std::byte>> many;
    for (int i = 0; i < 40; ++i) {
        many.emplace_back(9_MiB);
    }
    CHECK(b.pinned.bytes() == 40 * 9_MiB);
    many.clear();
    weight_stream<> loader;
    loader.reserve();
    CHECK(b.pinned.bytes() == loader.staging_bytes());
    CHECK(loader.staging_bytes() <= loader.staging_bytes_needed());
}

TEST_CASE("M05 a driver that locks no more than 64 MiB at once, and one that then fails at the third piece") {
    for (const int failing : {-1, 3}) {
        books b;
        b.pinned.locking.largest = 64_MiB;
        b.pinned.locking.failing_call = failing;
        {
            arena a(256_MiB, {.device = 0});
            MESSAGE(a.how());
            CHECK(a.pinned());
            CHECK(b.pinned.bytes() == 256_MiB);
            CHECK(b.pinned.blocks(had_by::locking) == (failing < 0 ? 4 : 0));
            CHECK(b.pinned.blocks(had_by::allocating) == (failing < 0 ? 0 : 1));
            tests::fill(a.bytes().last(1000), 1);
            const stream s;
            buffer<std::byte, memory::device> there(1000);
            there.copy_from_async(a.bytes().last(1000), s.get());
            there.wait();
            CHECK(tests::holds(tests::from_device(there.data(), 1000), 1));
        }
        CHECK(b.clean());
        CHECK(cudaGetLastError() == cudaSuccess);
    }
}

TEST_CASE("M06 a model of 256 MiB where 64 MiB, or nothing, can be pinned, with default settings") {
    const tests::temporary_directory dir;
    const tensor_list list = parts_of(tests::write_pattern(dir / "model", 0, 256_MiB), 64);
    for (const std::uint64_t limit : {64_MiB, 10_MiB, 0_MiB}) {
        books b;
        b.pinned.in_all = limit;
        {
            weight_stream<> loader;
            const loaded_tensors loaded = loader.load(list, on_device(0));
            MESSAGE("of " << limit << " bytes: staging of " << loader.staging_bytes() << ", " << loader.staging_how());
            CHECK(arrived(list, loaded));
            CHECK(b.pinned.peak() <= limit);
            CHECK((b.pinned.peak() > limit / 4 || limit == 0));  // and uses what it may
            CHECK(cudaGetLastError() == cudaSuccess);
        }
        CHECK(b.clean());
    }
}

TEST_CASE("M13 loading 64 experts of 1 MiB takes no more host memory than the staging of 4 MiB") {
    const tests::tiny_model tiny(1, 64, 512, 340);
    CHECK(tiny.model.record_bytes() > 1'000'000);
    const auto load = [&](const progress_callback& callback) {
        const std::uint64_t staging = weight_stream<small_chunks, few>({.readers = 1}).staging_bytes_needed();
        expert_store<small_chunks, few> store(tiny.model, {{64_MiB}, {staging}}, on_device(0), {}, {.readers = 4});
        CHECK(store.report().slots == 64);
        CHECK(store.report().host_slots == 0);
        store.preload_compute(callback);
        CHECK(store.report().host_peak_bytes <= staging);
        const stream s;
        run_step(store, tiny, std::vector<bool>(64, true), s.get());
        CHECK(store.report().misses == 0);
    };
    load({});  // what the runtime and the threads take once is taken
    books b;
    ::malloc_trim(0);
    const std::uint64_t before = anonymous_memory();
    std::uint64_t most = before;
    load([&](const progress&) { most = std::max(most, anonymous_memory()); });
    CHECK(b.pinned.peak() < 5_MiB);
    CHECK(most - before < 8_MiB);
    CHECK(b.device.peak() <= 64_MiB);
    CHECK(b.clean());
}

TEST_CASE("M14 whatever a store does, its device and pinned memory stay within the budgets") {
    const tests::tiny_model tiny(1, 32, 512, 340, 4);
    const stream s;
    books b;
    {
        expert_store<small_chunks, few> store(tiny.model, {{10_MiB}, {12_MiB}}, on_device(0));
        std::mt19937 random(7);
        for (int i = 0; i < 1000; ++i) {
            std::vector<bool> wanted(32);
            for (std::uint32_t n = 0; n < 1 + random() % (i % 100 == 0 ? 30 : 6); ++n) {
                wanted[random() % 32] = true;
            }
            run_step(store, tiny, wanted, s.get());
        }
        CHECK(store.report().evictions > 100);
        CHECK(store.report().device_peak_bytes == b.device.peak());
        CHECK(store.report().host_peak_bytes >= b.pinned.peak());
    }
    CHECK(b.device.peak() <= 10_MiB);
    CHECK(b.device.peak() > 8_MiB);
    CHECK(b.pinned.peak() <= 12_MiB);
    CHECK(b.clean());
}

TEST_CASE("M16 whichever allocation fails, everything is given back, and a retry works") {
    // Twenty places on one GPU are twenty allocations of a load; the tensors and the store are two more, with pinned memory beside each.
    const tests::tiny_model tiny(1, 20, 64, 48);
    const tests::temporary_directory dir;
    const tensor_list list = parts_of(tests::write_pattern(dir / "a", 0, 3'000'000), 3);
    const stream s;
    const shard_plan plan = shard_plan::by_expert(tiny.model, 20);
    const std::vector<place> places(20, on_device(0));
    using loader = weight_stream<chunking::fixed<64_KiB>, prefetch::depth<2>>;
    const auto work = [&] {
        loader stream({.readers = 2});
        const loaded_tensors loaded = stream.load(list, on_device(0));
        CHECK(arrived(list, loaded));
        expert_store<chunking::fixed<64_KiB>, prefetch::depth<2>> store(tiny.model, {{4 * tiny.slot_bytes()}, {1_MiB}}, on_device(0));
        run_step(store, tiny, std::vector<bool>(20, true), s.get());
        shard_options options;
        options.readers = 1;
        const sharded_experts sharded = load_sharded<loader>(tiny.model, plan, places, options);
        for (std::uint32_t g = 0; g < 20; ++g) {
            const std::vector<std::byte> record = tests::from_device(sharded[g].record(0, g), tiny.model.record_bytes());
            CHECK(tiny.is_record(0, g, record.data()));
        }
    };
    int allocations = 0;
    {
        books b;
        work();
        allocations = b.device.allocating.calls;
        CHECK(allocations >= 20);
        CHECK(b.clean());
    }
    for (int k = 0; k < allocations; ++k) {
        CAPTURE(k);
        books b;
        b.device.allocating.failing_call = k;
        CHECK_THROWS_WITH_AS(work(), doctest::Contains("GPU memory ran out"), out_of_memory);
        CHECK(b.clean());
        CHECK(cudaGetLastError() == cudaSuccess);
    }
    for (int k = 0; k < 20; ++k) {  // page-locked memory that cannot be had is had in another way
        CAPTURE(k);
        books b;
        b.pinned.locking.failing_call = k;
        work();
        CHECK(b.clean());
        CHECK(cudaGetLastError() == cudaSuccess);
    }
    work();
}

TEST_CASE("M16 a GPU that is really full, then emptied") {
    const tests::temporary_directory dir;
    const tensor_list list = parts_of(tests::write_pattern(dir / "a", 0, 64_MiB), 4);
    weight_stream<> loader;
    loader.reserve();
    static_cast<void>(loader.load(list, on_device(0)));
    std::size_t before = 0, after = 0, total = 0;
    check(cudaMemGetInfo(&before, &total), "cudaMemGetInfo");
    {
        std::vector<buffer<std::byte, memory::device>> full;
        for (std::size_t size = before; size >= 16_MiB;) {
            try {
                full.emplace_back(size);
            } catch (const out_of_memory&) {
                size /= 2;
            }
        }
        for (int i = 0; i < 3; ++i) {
            CHECK_THROWS_WITH_AS(static_cast<void>(loader.load(list, on_device(0))), doctest::Contains("64.0 MiB were asked for"),
                                 out_of_memory);
            CHECK(cudaGetLastError() == cudaSuccess);
        }
    }
    check(cudaMemGetInfo(&after, &total), "cudaMemGetInfo");
    CHECK(after >= before);  // the driver may have given back some of its own
    CHECK(arrived(list, loader.load(list, on_device(0))));
}

TEST_CASE("M19 an automatic budget follows the free memory of its own device") {
    if (device_count() < 2) {
        MESSAGE("skipped: " << device_count() << " GPU here, this case needs two");
        return;
    }
    tests::tiny_model tiny(1, 4);
    tiny.model.layers[0].layout.bytes = 16_MiB;  // nothing is read, so the records need not be there
    tiny.model.layers[0].experts.resize(100'000);
    check(cudaSetDevice(0), "cudaSetDevice");
    const auto free_on = [](int device) {
        const device_guard on(device);
        std::size_t free = 0, total = 0;
        check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
        return free;
    };
    check(cudaFree(nullptr), "context");
    const buffer<std::byte, memory::device> most_of_the_first(free_on(0) / 10 * 9);
    const std::size_t free = free_on(1);
    REQUIRE(free > 2 * free_on(0));
    expert_store<small_chunks, few> store(tiny.model, {automatic, {8_MiB}}, on_device(1));
    const std::uint64_t taken = store.report().device_peak_bytes;
    CHECK(taken <= free / 10 * 9);
    CHECK(taken > free / 10 * 9 - 64_MiB);
    CHECK(free_on(1) < free / 4);
    int now = -1;
    check(cudaGetDevice(&now), "cudaGetDevice");
    CHECK(now == 0);
}

TEST_CASE("M20 budgets of device memory at their corners") {
    tests::tiny_model tiny;
    const std::uint64_t slot = tiny.slot_bytes();
    const std::uint64_t staging = weight_stream<small_chunks, few>({.readers = 1}).staging_bytes_needed();
    const auto slots = [&](bytes device) {
        return expert_store<small_chunks, few>(tiny.model, {device, {staging}}, on_device(0)).report().slots;
    };
    books b;
    for (const std::uint64_t too_little : {std::uint64_t{0}, std::uint64_t{1}, slot - 1}) {
        CHECK_THROWS_WITH_AS(static_cast<void>(slots({too_little})), doctest::Contains(std::to_string(slot).c_str()), configuration_error);
    }
    CHECK(b.device.allocating.calls == 0);
    CHECK(slots({slot}) == 1);
    CHECK(slots(automatic) == 16);
    CHECK(slots({automatic.count - 1}) == 16);
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    CHECK(slots({2 * total}) == 16);
    CHECK_THROWS_WITH_AS(static_cast<void>(expert_store<small_chunks, few>(tiny.model, {{slot}, {staging - 1}}, on_device(0))),
                         doctest::Contains("are the least"), configuration_error);
    // More than there is: at construction, not at the first step.
    tiny.model.layers[0].layout.bytes = std::uint64_t{1} << 42;
    CHECK_THROWS_WITH_AS(static_cast<void>(slots({std::uint64_t{1} << 46})), doctest::Contains("GPU memory ran out"), out_of_memory);
    CHECK(b.clean());
    CHECK(cudaGetLastError() == cudaSuccess);
}

namespace {

constexpr const char* in_the_child = "PENSTOCK_TEST_EXIT_WHILE_LOADING";
constexpr int status_of_the_child = 7;

/// Bytes by formula, slowly, so that the load does not end before the program does.
struct endless final : byte_source {
    std::atomic<int> reads{0};
    void read(std::uint32_t, std::uint64_t offset, std::span<std::byte> into) override {
        ++reads;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        tests::fill(into, 0, offset);
    }
    std::string name(std::uint32_t) const override { return "endless"; }
};

std::optional<tests::tiny_model> model_that_outlives_main;
std::optional<buffer<std::byte, memory::device>> destination_that_outlives_main;
std::optional<endless> source_that_outlives_main;
std::optional<weight_stream<chunking::fixed<64_KiB>>> loader_that_outlives_main;
std::optional<expert_store<>> store_that_outlives_main;
std::optional<ticket> load_that_outlives_main;

[[noreturn]] void exit_while_loading() {
    constexpr std::uint64_t size = 1_GiB;
    model_that_outlives_main.emplace();
    destination_that_outlives_main.emplace(size);
    source_that_outlives_main.emplace();
    loader_that_outlives_main.emplace();
    store_that_outlives_main.emplace(model_that_outlives_main->model, budgets{automatic, {1_GiB}}, on_device(0));
    store_that_outlives_main->preload_compute();
    transfer t;
    t.bytes = size;
    t.destination = destination_that_outlives_main->data();
    t.level = urgency::prefetch;
    load_that_outlives_main.emplace(loader_that_outlives_main->start({&t, 1}, *source_that_outlives_main, on_device(0)));
    while (source_that_outlives_main->reads < 30) {
        std::this_thread::yield();
    }
    std::thread([] { std::exit(status_of_the_child); }).detach();
    for (;;) {
        ::pause();
    }
}

}  // namespace

TEST_CASE("M10 objects that outlive main: exit from a second thread while a GPU is being loaded") {
    if (std::getenv(in_the_child) != nullptr) {
        exit_while_loading();
    }
    const tests::temporary_directory dir;
    const std::string said = (dir / "said").string();
    const std::string command = std::string(in_the_child) + "=1 '" + std::filesystem::read_symlink("/proc/self/exe").string() +
                                "' --test-case='M10 *exit from a second thread*' 2> '" + said + "' > /dev/null";
    const int status = std::system(command.c_str());
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == status_of_the_child);
    CHECK(std::filesystem::file_size(said) == 0);
}

TEST_CASE("M10 objects that outlive main: a store with full slots, and its host tier") {
    model_that_outlives_main.emplace();
    store_that_outlives_main.emplace(model_that_outlives_main->model, budgets{automatic, {1_GiB}}, on_device(0));
    store_that_outlives_main->preload_host();
    store_that_outlives_main->preload_compute();
    CHECK(store_that_outlives_main->report().slots == 16);
}
