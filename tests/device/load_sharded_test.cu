#include "../tiny_model.hpp"
#include "gpu_work.hpp"

#include <penstock/model/selection.hpp>
#include <penstock/stream/link_speed.hpp>
#include <penstock/stream/load_sharded.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstdio>
#include <iostream>

namespace {

using namespace penstock;
using namespace penstock::literals;

int current_device() {
    int device = -1;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
}

std::vector<std::byte> bytes_at(const place& where, const std::byte* data, std::size_t size) {
    if (where.on_host()) {
        return {data, data + size};
    }
    return tests::from_device(data, size);
}

/// Files that count the bytes read of them.
class counted_source final : public byte_source {
public:
    counted_source(std::vector<std::filesystem::path> files, std::atomic<std::uint64_t>& bytes) : files_(std::move(files)), bytes_(bytes) {}
    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        bytes_ += into.size();
        files_.read(file, offset, into);
    }
    std::string name(std::uint32_t file) const override { return files_.name(file); }
    std::string condition(std::uint32_t file) const override { return files_.condition(file); }

private:
    file_source files_;
    std::atomic<std::uint64_t>& bytes_;
};

/// Every record is where the plan says and nowhere else, on the right device, and nothing was read twice.
void load_and_check(const tests::tiny_model& tiny, const shard_plan& plan, const std::vector<place>& places) {
    const int before = current_device();
    std::atomic<std::uint64_t> read{0};
    shard_options options;
    options.readers = 3;
    options.open = [&](const std::vector<std::filesystem::path>& files) { return std::make_unique<counted_source>(files, read); };
    {
        const sharded_experts loaded =
            load_sharded<weight_stream<chunking::fixed<256_KiB>, prefetch::depth<4>>>(tiny.model, plan, places, options);
        CHECK(current_device() == before);
        std::uint64_t bytes = 0;
        for (std::uint32_t g = 0; g < plan.gpus(); ++g) {
            const loaded_shard& shard = loaded[g];
            bytes += plan.bytes(g);
            CHECK(shard.report().bytes == plan.bytes(g));
            if (!places[g].on_host() && shard.bytes() > 0) {
                cudaPointerAttributes about{};
                check(cudaPointerGetAttributes(&about, shard.data()), "cudaPointerGetAttributes");
                CHECK(about.type == cudaMemoryTypeDevice);
                CHECK(about.device == places[g].device);
                CHECK(shard.report().staging_bytes > 0);
                CHECK(shard.report().staging_bytes < 1_MiB + 100_KiB);  // and a page a slot
                CHECK(shard.report().seconds_to_pin > 0);
            }
            for (std::uint32_t l = 0; l < plan.layers(); ++l) {
                for (std::uint32_t e = 0; e < plan.experts(l); ++e) {
                    const std::byte* record = shard.record(l, e);
                    CHECK((record != nullptr) == plan.local_index(l, e, g).has_value());
                    if (record != nullptr) {
                        CHECK(reinterpret_cast<std::uintptr_t>(record) % 256 == 0);
                        const std::vector<std::byte> copy = bytes_at(places[g], record, tiny.model.layers[l].layout.bytes);
                        CHECK(tiny.is_record(l, e, copy.data()));
                    }
                }
            }
        }
        CHECK(read == bytes);
        std::cout << loaded.reports();
    }
    CHECK(current_device() == before);
}

}  // namespace

TEST_CASE("one GPU holds all experts") {
    const tests::tiny_model tiny(3, 30, 256, 96);
    load_and_check(tiny, shard_plan::by_expert(tiny.model, 1), on_devices({0}));
    const stream own(0);
    load_and_check(tiny, shard_plan::by_expert(tiny.model, 1), {on_device(0, own.get())});
}

TEST_CASE("two ranks on one GPU, and a rank in host memory") {
    const tests::tiny_model tiny(3, 7, 256, 96);
    load_and_check(tiny, shard_plan::by_expert(tiny.model, 2), on_devices({0, 0}));
    load_and_check(tiny, shard_plan::by_expert(tiny.model, 3, placement::round_robin{}), {on_device(0), on_host(), on_device(0)});
    const tests::tiny_model few(2, 1, 256, 96);
    load_and_check(few, shard_plan::by_expert(few.model, 2), on_devices({0, 0}));
}

TEST_CASE("lists of tensors on a GPU, held against its link") {
    const tests::tiny_model tiny(1, 2, 256, 96);
    std::vector<tensor_list> lists(2, tensor_list{tiny.model.files, {}});
    for (std::size_t i = 0; i < 2; ++i) {
        const record_part& part = tiny.model.layers[0].experts[i][0];
        lists[i].tensors.push_back({"gate", dtype::bf16, {96, 256}, part.file, part.offset, part.bytes});
    }
    const std::vector<place> places = on_devices({0, 0});
    sharded_tensors loaded = load_sharded(lists, places);
    file_source file(tiny.model.files);
    for (std::size_t i = 0; i < 2; ++i) {
        const tensor_view& gate = loaded.parts[i]["gate"];
        std::vector<std::byte> wanted(gate.bytes);
        file.read(0, lists[i].tensors[0].offset, wanted);
        CHECK(bytes_at(places[i], gate.data, gate.bytes) == wanted);
        loaded.reports[i].link_gb_per_s = link_gb_per_s(0, 32_MiB, 3);
        CHECK(loaded.reports[i].link_gb_per_s > 1);
    }
    std::cout << loaded.reports;
    CHECK_THROWS_AS(static_cast<void>(link_gb_per_s(device_count())), configuration_error);
}

TEST_CASE("slices on a GPU are the values of the whole") {
    const tests::tiny_model tiny(2, 2, 64, 80);
    const shard_plan plan = shard_plan::by_slice(tiny.model, 2);
    const sharded_experts there = load_sharded(tiny.model, plan, on_devices({0, 0}));
    const sharded_experts here = load_sharded(tiny.model, plan, std::vector<place>(2));
    for (std::uint32_t g = 0; g < 2; ++g) {
        for (std::uint32_t e = 0; e < 2; ++e) {
            const std::size_t size = there[g].layout(1).bytes;
            CHECK(bytes_at(on_device(0), there[g].record(1, e), size) == bytes_at(on_host(), here[g].record(1, e), size));
        }
    }
}

TEST_CASE("an error on a GPU names it and gives everything back") {
    const tests::tiny_model tiny(3, 8, 256, 96);
    const shard_plan plan = shard_plan::by_expert(tiny.model, 1);
    load_and_check(tiny, plan, on_devices({0}));  // whatever the runtime allocates once is allocated
    std::size_t before = 0, after = 0, total = 0;
    check(cudaMemGetInfo(&before, &total), "cudaMemGetInfo");
    shard_options options;
    options.callback = [](const progress&) { throw io_error("penstock: on purpose"); };
    std::string text;
    try {
        static_cast<void>(load_sharded(tiny.model, plan, on_devices({0}), options));
    } catch (const io_error& e) {
        text = e.what();
    }
    CHECK(text == "penstock: GPU 0 (place 0): on purpose");
    check(cudaMemGetInfo(&after, &total), "cudaMemGetInfo");
    CHECK(after + 2_MiB > before);  // the slab alone is more
    load_and_check(tiny, plan, on_devices({0}));
    CHECK_THROWS_AS(static_cast<void>(load_sharded(tiny.model, plan, on_devices({device_count()}))), configuration_error);
}

TEST_CASE("two GPUs: each its own experts, the caller's device stays") {
    if (device_count() < 2) {
        std::printf("skipped: %d GPU here, this part needs two\n", device_count());
        return;
    }
    const tests::tiny_model tiny(3, 31, 256, 96);
    const expert_loads loads(3, std::vector<double>(31, 1.0));
    for (const int caller : {0, 1}) {
        const device_guard on(caller);
        load_and_check(tiny, shard_plan::by_expert(tiny.model, 2), on_devices({0, 1}));
        load_and_check(tiny, shard_plan::by_expert(tiny.model, 2, placement::round_robin{}), on_devices({1, 0}));
        load_and_check(tiny, shard_plan::by_expert(tiny.model, 2, placement::by_load{loads}).replicate(3), on_devices({0, 1}));
    }
    const tests::tiny_model few(2, 1, 256, 96);
    load_and_check(few, shard_plan::by_expert(few.model, 2), on_devices({0, 1}));
    const stream first(0), second(1);
    load_and_check(tiny, shard_plan::by_expert(tiny.model, 2), {on_device(0, first.get()), on_device(1, second.get())});
}
