#include "../tiny_model.hpp"

#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/model/selection.hpp>
#include <penstock/stream/load_sharded.hpp>

#include <doctest/doctest.h>

#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace {

using namespace penstock;
using namespace penstock::literals;

using range = std::pair<std::uint64_t, std::uint64_t>;  // offset, bytes

/// What was read, by source, of which load_sharded makes one a place.
struct read_log {
    std::mutex mutex;
    int sources = 0;
    std::map<int, std::vector<range>> reads;
};

/// Files whose reads are written down; `hook` is called before each.
class logged_source final : public byte_source {
public:
    logged_source(std::vector<std::filesystem::path> files, read_log& to, std::function<void(std::uint64_t)> hook = {})
        : files_(std::move(files)), to_(to), hook_(std::move(hook)) {
        const std::lock_guard lock(to_.mutex);
        number_ = to_.sources++;
    }

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        {
            const std::lock_guard lock(to_.mutex);
            to_.reads[number_].emplace_back(offset, into.size());
        }
        if (hook_) {
            hook_(offset);
        }
        files_.read(file, offset, into);
    }
    std::string name(std::uint32_t file) const override { return files_.name(file); }
    std::string condition(std::uint32_t) const override { return "logged"; }

private:
    file_source files_;
    read_log& to_;
    int number_ = 0;
    std::function<void(std::uint64_t)> hook_;
};

shard_options logged(read_log& to, std::function<void(std::uint64_t)> hook = {}) {
    shard_options options;
    options.readers = 2;
    options.open = [&to, hook](const std::vector<std::filesystem::path>& files) {
        return std::make_unique<logged_source>(files, to, hook);
    };
    return options;
}

/// The ranges of a place's experts, sorted, neighbours joined; and of what was read.
std::vector<range> joined(std::vector<range> ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::vector<range> result;
    for (const range& r : ranges) {
        if (!result.empty() && result.back().first + result.back().second == r.first) {
            result.back().second += r.second;
        } else {
            result.push_back(r);
        }
    }
    return result;
}

std::vector<range> owned(const moe_model& model, const shard_plan& plan, std::uint32_t gpu) {
    std::vector<range> result;
    for (std::uint32_t l = 0; l < plan.layers(); ++l) {
        for (const std::uint32_t e : plan.experts_of(l, gpu)) {
            for (const record_part& p : model.layers[l].experts[e]) {
                result.emplace_back(p.offset, p.bytes);
            }
        }
    }
    return joined(std::move(result));
}

template <class Error>
std::string refusal(const auto& call) {
    try {
        static_cast<void>(call());
    } catch (const Error& e) {
        return e.what();
    }
    return {};
}

std::vector<place> hosts(std::size_t n) { return std::vector<place>(n, on_host()); }

bool holds(const std::string& text, std::initializer_list<const char*> words) {
    return std::all_of(words.begin(), words.end(), [&](const char* w) { return text.find(w) != std::string::npos; });
}

}  // namespace

TEST_CASE("each place gets its own experts' records and reads nothing else") {
    const tests::tiny_model tiny(3, 30, 64, 48);
    const expert_loads loads(3, {9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 8});
    for (const shard_plan& plan : {shard_plan::by_expert(tiny.model, 1), shard_plan::by_expert(tiny.model, 2),
                                   shard_plan::by_expert(tiny.model, 8), shard_plan::by_expert(tiny.model, 2, placement::round_robin{}),
                                   shard_plan::by_expert(tiny.model, 3, placement::by_load{loads}).replicate(2)}) {
        read_log read;
        const std::vector<place> places = hosts(plan.gpus());
        const sharded_experts loaded = load_sharded(tiny.model, plan, places, logged(read));
        REQUIRE(loaded.shards.size() == plan.gpus());
        CHECK(read.reads.size() == plan.gpus());
        std::multiset<std::vector<range>> wanted, got;
        for (std::uint32_t g = 0; g < plan.gpus(); ++g) {
            const loaded_shard& shard = loaded[g];
            const std::byte* next = shard.data();
            for (std::uint32_t l = 0; l < plan.layers(); ++l) {
                const auto held = plan.experts_of(l, g);
                CHECK(std::equal(held.begin(), held.end(), shard.experts(l).begin(), shard.experts(l).end()));
                CHECK(shard.stride(l) == tiny.slot_bytes());
                for (std::uint32_t e = 0; e < plan.experts(l); ++e) {
                    const std::byte* record = shard.record(l, e);
                    CHECK((record != nullptr) == plan.local_index(l, e, g).has_value());
                    if (record != nullptr) {
                        CHECK(record == next);  // one slab, in the order of layers and local ids
                        CHECK(reinterpret_cast<std::uintptr_t>(record) % 256 == 0);
                        CHECK(tiny.is_record(l, e, record));
                        next += shard.stride(l);
                    }
                }
            }
            CHECK(next == shard.data() + shard.bytes());
            CHECK(shard.report().bytes == plan.bytes(g));
            CHECK(shard.report().memory == shard.bytes());
            CHECK(shard.report().source == "logged");
            CHECK(shard.report().readers == 2);
            CHECK(shard.report().staging_bytes == 0);  // host places need none
            CHECK(shard.report().seconds > 0);
            wanted.insert(owned(tiny.model, plan, g));
            CHECK_THROWS_AS(static_cast<void>(shard.record(3, 0)), configuration_error);
        }
        for (const auto& [source, ranges] : read.reads) {
            got.insert(joined(ranges));
        }
        CHECK(got == wanted);
    }
}

TEST_CASE("a GPU that owns nothing reads nothing") {
    const tests::tiny_model tiny(2, 1);
    read_log read;
    const std::vector<place> places = hosts(2);
    const sharded_experts loaded = load_sharded(tiny.model, shard_plan::by_expert(tiny.model, 2), places, logged(read));
    CHECK(tiny.is_record(1, 0, loaded[0].record(1, 0)));
    CHECK(loaded[1].record(1, 0) == nullptr);
    CHECK(loaded[1].bytes() == 0);
    CHECK(loaded[1].report().reads == 0);
    CHECK(read.reads.size() == 1);
}

TEST_CASE("slices: each place holds its rows and columns of every expert, and reads them alone") {
    const tests::tiny_model tiny(2, 3, 64, 80);
    const shard_plan plan = shard_plan::by_slice(tiny.model, 3);  // 32, 32, 16
    read_log read;
    const std::vector<place> places = hosts(3);
    const sharded_experts loaded = load_sharded(tiny.model, plan, places, logged(read));
    file_source file(tiny.model.files);
    std::uint64_t bytes = 0;
    for (std::uint32_t l = 0; l < 2; ++l) {
        const expert_layout& whole = tiny.model.layers[l].layout;
        for (std::uint32_t e = 0; e < 3; ++e) {
            std::vector<std::byte> record(whole.bytes);
            for (const record_part& p : tiny.model.layers[l].experts[e]) {
                file.read(p.file, p.offset, std::span(record).subspan(p.record_offset, p.bytes));
            }
            std::size_t wrong = 0;
            for (std::uint32_t g = 0; g < 3; ++g) {
                const expert_layout& cut = loaded[g].layout(l);
                const auto first = static_cast<std::uint32_t>(plan.slice_of(l, g).first);
                CHECK(cut.intermediate() == plan.slice_of(l, g).count);
                for (std::uint32_t r = 0; r < cut.intermediate(); ++r) {
                    for (std::uint32_t c = 0; c < 64; ++c) {
                        const std::byte* mine = loaded[g].record(l, e);
                        wrong +=
                            weight_at(whole.kind, whole.gate, record.data(), first + r, c) != weight_at(whole.kind, cut.gate, mine, r, c);
                        wrong += weight_at(whole.kind, whole.up, record.data(), first + r, c) != weight_at(whole.kind, cut.up, mine, r, c);
                        wrong +=
                            weight_at(whole.kind, whole.down, record.data(), c, first + r) != weight_at(whole.kind, cut.down, mine, c, r);
                    }
                }
            }
            CHECK(wrong == 0);
        }
    }
    for (const auto& [source, ranges] : read.reads) {
        for (const range& r : ranges) {
            bytes += r.second;
        }
    }
    CHECK(bytes == tiny.model.expert_bytes());
    CHECK(loaded[0].report().bytes == plan.bytes(0));
}

TEST_CASE("progress of all places together") {
    const tests::tiny_model tiny(3, 8);
    const shard_plan plan = shard_plan::by_expert(tiny.model, 2);
    std::vector<progress> seen;
    shard_options options;
    options.callback = [&](const progress& p) { seen.push_back(p); };  // one thread at a time: no lock here
    const std::vector<place> places = hosts(2);
    static_cast<void>(load_sharded<weight_stream<chunking::fixed<1_KiB>>>(tiny.model, plan, places, options));
    REQUIRE(!seen.empty());
    CHECK(std::is_sorted(seen.begin(), seen.end(), [](const progress& a, const progress& b) { return a.bytes < b.bytes; }));
    CHECK(seen.back().bytes == seen.back().total);
    CHECK(seen.back().total == tiny.model.expert_bytes());
    CHECK(seen.size() > 20);
}

TEST_CASE("the first error names its place, the others stop, and a second try works") {
    const tests::tiny_model tiny(3, 8);
    const shard_plan plan = shard_plan::by_expert(tiny.model, 2);
    const std::uint64_t bad = tiny.model.layers[1].experts[6][0].offset;  // GPU 1's
    read_log read;
    std::atomic<bool> broken{false};
    const auto hook = [&](std::uint64_t offset) {
        if (offset <= bad && bad < offset + 1024) {
            broken = true;
            throw io_error("weights: " + std::to_string(offset) + " cannot be read");
        }
        while (offset >= tiny.model.layers[2].experts[0][0].offset && !broken) {  // the last layer waits for the error
            std::this_thread::yield();
        }
    };
    const std::vector<place> places = hosts(2);
    using small = weight_stream<chunking::fixed<1_KiB>>;
    const std::string text = refusal<io_error>([&] { return load_sharded<small>(tiny.model, plan, places, logged(read, hook)); });
    CHECK(holds(text, {"penstock: place 1 (host memory): weights: ", "cannot be read"}));
    CHECK(tiny.is_record(2, 7, load_sharded<small>(tiny.model, plan, places, logged(read))[1].record(2, 7)));

    shard_options options;
    options.callback = [](const progress&) { throw std::logic_error("mine"); };
    CHECK(refusal<std::logic_error>([&] { return load_sharded(tiny.model, plan, places, options); }) == "mine");
    std::filesystem::resize_file(tiny.path(), 5000);
    CHECK(holds(refusal<io_error>([&] { return load_sharded(tiny.model, plan, places); }),
                {"place ", tiny.path().c_str(), "wanted at offset", "were got", "(in expert ", " of layer "}));
}

TEST_CASE("a load for several places can be cancelled") {
    const tests::tiny_model tiny(3, 8);
    const shard_plan plan = shard_plan::by_expert(tiny.model, 2);
    read_log read;
    std::stop_source stop;
    shard_options options = logged(read, [&](std::uint64_t) { stop.request_stop(); });
    options.stop = stop.get_token();
    const std::vector<place> places = hosts(2);
    using small = weight_stream<chunking::fixed<1_KiB>>;
    CHECK(holds(refusal<cancelled>([&] { return load_sharded<small>(tiny.model, plan, places, options); }), {"place ", "cancelled"}));
    std::size_t reads = 0;
    for (const auto& [source, ranges] : read.reads) {
        reads += ranges.size();
    }
    CHECK(reads <= 2 * 2 * 2);  // two chunks of each reader, at most
}

TEST_CASE("wrong places and plans are refused before anything is read") {
    const tests::tiny_model tiny(2, 8), other(2, 7);
    const shard_plan plan = shard_plan::by_expert(tiny.model, 2);
    const auto refused = [&](const moe_model& model, const std::vector<place>& places) {
        read_log read;
        const std::string text = refusal<configuration_error>([&] { return load_sharded(model, plan, places, logged(read)); });
        CHECK(read.reads.empty());
        return text;
    };
    CHECK(holds(refused(tiny.model, hosts(3)), {"3 places for 2 GPUs"}));
    CHECK(holds(refused(other.model, hosts(2)), {"another model"}));
    CHECK(holds(refused(tiny.model, {on_host(), on_device(1000)}), {"device 1000"}));
    CHECK(on_devices({2, 0})[0].device == 2);
    CHECK(on_devices({2, 0})[1].device == 0);
}

TEST_CASE("lists of tensors over places, and a checkpoint's experts") {
    const checkpoint weights = checkpoint::open(std::filesystem::path(PENSTOCK_FIXTURES) / "qwen3_moe");
    const std::vector<tensor_list> lists = split_by_bytes(weights.all(), 3);
    const std::vector<place> places = hosts(3);
    const sharded_tensors loaded = load_sharded(lists, places);
    file_source files(weights.all().files);
    std::size_t tensors = 0;
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(loaded.parts[i].size() == lists[i].tensors.size());
        tensors += loaded.parts[i].size();
        bytes += loaded.reports[i].bytes;
        for (const tensor_info& t : lists[i].tensors) {
            std::vector<std::byte> wanted(t.bytes);
            files.read(t.file, t.offset, wanted);
            CHECK(std::memcmp(wanted.data(), loaded.parts[i][t.name].data, t.bytes) == 0);
        }
    }
    CHECK(tensors == weights.all().tensors.size());
    std::ostringstream table;
    std::vector<shard_report> reports = loaded.reports;
    reports[1].bytes = 3'000'000'000;
    reports[1].seconds = 0.125;
    reports[1].link_gb_per_s = 48;
    table << reports;
    CHECK(holds(table.str(), {"place", "seconds", "host", std::to_string(reports[2].bytes).c_str(), "0.125", "24.00", " 50.0 %", " - "}));
    read_log log;
    static_cast<void>(load_sharded(lists, places, logged(log)));
    CHECK(log.sources == 3);
    CHECK(log.reads.size() == 3);
    CHECK_THROWS_AS(static_cast<void>(load_sharded(lists, hosts(2))), configuration_error);

    const moe_model model = describe(weights);
    const std::vector<place> two = hosts(2);
    const sharded_experts experts = load_sharded(weights, shard_plan::by_expert(model, 2), two);
    CHECK(experts[0].report().bytes + experts[1].report().bytes == model.expert_bytes());
    const expert_parts& parts = model.layers[0].experts.back();
    std::vector<std::byte> part(parts[0].bytes);
    files.read(parts[0].file, parts[0].offset, part);
    CHECK(std::memcmp(part.data(), experts[1].record(0, model.layers[0].routing.experts - 1) + parts[0].record_offset, part.size()) == 0);
}
