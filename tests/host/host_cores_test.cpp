#include <penstock/buffer/host_cores.hpp>
#include <penstock/buffer/host_memory.hpp>
#include <penstock/buffer/host_region.hpp>
#include <penstock/dispatch/thread_pool.hpp>

#include <doctest/doctest.h>

#include <cstdlib>
#include <set>

namespace {

using namespace penstock;

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

/// A folder of the kernel's files as a test wants them.
class fake_files {
public:
    fake_files() {
        std::string name = (std::filesystem::temp_directory_path() / "penstock-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        root_ = name;
    }
    fake_files(const fake_files&) = delete;
    fake_files& operator=(const fake_files&) = delete;
    ~fake_files() { std::filesystem::remove_all(root_); }

    fake_files& write(const std::filesystem::path& name, const std::string& text) {
        std::filesystem::create_directories((root_ / name).parent_path());
        std::ofstream(root_ / name) << text << '\n';
        return *this;
    }

    [[nodiscard]] const std::filesystem::path& root() const { return root_; }
    [[nodiscard]] detail::cgroup_view as_cgroups(const std::string& membership) const { return {root_, membership}; }

private:
    std::filesystem::path root_;
};

std::uint64_t cores(const fake_files& files, const std::string& membership) {
    return detail::cores_of_cgroups(files.as_cgroups(membership));
}

std::uint64_t memory_left(const fake_files& files, const std::string& membership) {
    return detail::memory_left_in_cgroups(files.as_cgroups(membership));
}

/// What a thread of its own says, so that the caller's affinity stays.
template <class Work>
void on_a_thread(Work work) {
    std::thread(work).join();
}

TEST_CASE("cgroup v2: a quota of the process's own cgroup") {
    fake_files files;
    files.write("a/b/cpu.max", "400000 100000").write("a/cpu.max", "max 100000");
    CHECK(cores(files, "0::/a/b\n") == 4);
    CHECK(cores(files, "0::/a\n") == unlimited);
    CHECK(cores(files, "0::/\n") == unlimited);
    CHECK(cores(files, "0::/elsewhere\n") == unlimited);
}

TEST_CASE("cgroup v2: the smallest quota on the way to the root holds") {
    fake_files files;
    files.write("a/b/c/cpu.max", "800000 100000").write("a/b/cpu.max", "max 100000").write("a/cpu.max", "300000 100000");
    CHECK(cores(files, "0::/a/b/c\n") == 3);
    files.write("cpu.max", "100000 50000");  // a container sees its own cgroup as the root
    CHECK(cores(files, "0::/a/b/c\n") == 2);
    CHECK(cores(files, "0::/\n") == 2);
    CHECK(cores(files, "0::/kubepods/outside/name\n") == 2);
    CHECK(cores(files, "") == 2);
}

TEST_CASE("A part of a core counts as one") {
    fake_files files;
    const auto with = [&](const char* text) { return cores(files.write("own/cpu.max", text), "0::/own\n"); };
    CHECK(with("250000 100000") == 3);
    CHECK(with("200001 100000") == 3);
    CHECK(with("200000 100000") == 2);
    CHECK(with("50000 100000") == 1);
    CHECK(with("1000 1000000") == 1);
}

TEST_CASE("Quotas that say nothing") {
    fake_files files;
    CHECK(cores(files, "0::/own\n") == unlimited);
    for (const char* text : {"max 100000", "", "100000", "100000 0", "-1 100000", "0 100000", "some words"}) {
        CAPTURE(text);
        files.write("own/cpu.max", text);
        CHECK(cores(files, "0::/own\n") == unlimited);
    }
}

TEST_CASE("cgroup v1: the quota of the cpu controller") {
    const std::string membership = "5:memory:/other\n4:cpu,cpuacct:/a/b\n3:cpuset:/wrong\n1:name=systemd:/wrong\n0::/\n";
    fake_files files;
    files.write("cpu/a/b/cpu.cfs_quota_us", "-1").write("cpu/a/b/cpu.cfs_period_us", "100000");
    files.write("cpu/wrong/cpu.cfs_quota_us", "100000").write("cpu/wrong/cpu.cfs_period_us", "100000");
    CHECK(cores(files, membership) == unlimited);
    files.write("cpu/a/cpu.cfs_quota_us", "550000").write("cpu/a/cpu.cfs_period_us", "100000");
    CHECK(cores(files, membership) == 6);
    files.write("cpu/a/b/cpu.cfs_quota_us", "200000");
    CHECK(cores(files, membership) == 2);
    CHECK(cores(files, "4:cpu:/a/b") == 2);
    CHECK(cores(files, "4:cpuacct,cpu:/a/b") == 2);
    CHECK(cores(files, "4:cpuacct:/a/b") == unlimited);
}

TEST_CASE("cgroup v1: controllers mounted together, without a link for each") {
    fake_files files;
    files.write("cpu,cpuacct/a/cpu.cfs_quota_us", "200000").write("cpu,cpuacct/a/cpu.cfs_period_us", "100000");
    CHECK(cores(files, "4:cpu,cpuacct:/a\n") == 2);
}

TEST_CASE("Version 2 beside version 1, in a folder of its own") {
    fake_files files;
    files.write("unified/a/cpu.max", "200000 100000");
    CHECK(cores(files, "4:memory:/b\n0::/a\n") == 2);
}

TEST_CASE("A cgroup's name may hold a colon, and one outside of what is shown is not looked for") {
    fake_files files;
    files.write("a:b/cpu.max", "200000 100000").write("in/cpu.max", "300000 100000").write("outside/cpu.max", "100000 100000");
    CHECK(cores(files, "0::/a:b\n") == 2);
    detail::cgroup_view view = files.as_cgroups("0::/../outside\n");
    view.root /= "in";
    CHECK(detail::cores_of_cgroups(view) == 3);
}

TEST_CASE("Usable cores: the mask or the quota, whichever is less, and at least one") {
    fake_files files;
    const auto usable = [&](std::size_t cpus) { return detail::cores_within(cpus, files.as_cgroups("0::/\n")); };
    CHECK(usable(128) == 128);
    CHECK(usable(0) == 1);
    files.write("cpu.max", "200000 100000");
    CHECK(usable(128) == 2);
    CHECK(usable(1) == 1);
    CHECK(usable(0) == 1);
}

TEST_CASE("A mask longer than 1024 CPUs") {
    std::vector<std::size_t> tried;
    const auto kernel = [&](std::size_t bytes, unsigned long* words) {
        tried.push_back(bytes);
        if (bytes < 4096 / 8) {
            errno = EINVAL;
            return -1;
        }
        words[0] = 0b1011;
        words[3000 / 64] = 1ul << 3000 % 64;
        words[bytes / 8 - 1] = 1ul << 63;
        return 0;
    };
    CHECK(detail::cpus_of_mask(kernel) == std::vector<int>{0, 1, 3, 3000, 4095});
    CHECK(tried == std::vector<std::size_t>{128, 256, 512});
    int calls = 0;
    const auto refuse = [&](int code) {
        return [&calls, code](std::size_t, unsigned long*) {
            ++calls;
            errno = code;
            return -1;
        };
    };
    CHECK(detail::cpus_of_mask(refuse(EPERM)).empty());
    CHECK(calls == 1);
    CHECK(detail::cpus_of_mask(refuse(EINVAL)).empty());
    CHECK(calls < 20);
}

TEST_CASE("Lists of CPUs") {
    using list = std::vector<int>;
    CHECK(detail::parse_cpu_list("0-3,8,10-11\n") == list{0, 1, 2, 3, 8, 10, 11});
    CHECK(detail::parse_cpu_list("7") == list{7});
    CHECK(detail::parse_cpu_list("0-0\n") == list{0});
    CHECK(detail::parse_cpu_list("1022-1025") == list{1022, 1023, 1024, 1025});
    for (const char* wrong :
         {"", "\n", "-", "3-", "-3", "3-1", "1,,2", ",1", "1,", "1 2", "0x3", "a", "0-99999999", "99999999999", "1-2-3"}) {
        CAPTURE(wrong);
        CHECK(detail::parse_cpu_list(wrong).empty());
    }
}

TEST_CASE("The CPUs of a NUMA node") {
    fake_files files;
    files.write("node0/cpulist", "0-1,4").write("node12/cpulist", "2-3").write("node2/cpulist", "");
    CHECK(detail::read_cpus_of_node(0, files.root()) == std::vector<int>{0, 1, 4});
    CHECK(detail::read_cpus_of_node(12, files.root()) == std::vector<int>{2, 3});
    CHECK(detail::read_cpus_of_node(2, files.root()).empty());  // memory alone
    CHECK(detail::read_cpus_of_node(1, files.root()).empty());
    CHECK(detail::read_cpus_of_node(-1, files.root()).empty());
    CHECK(cpus_of_node(-1).empty());
    CHECK(cpus_of_node(1 << 20).empty());
}

TEST_CASE("Memory: the tightest limit on the way to the root holds") {
    fake_files files;
    files.write("a/b/memory.max", "max").write("a/b/memory.current", "100");
    CHECK(memory_left(files, "0::/a/b\n") == unlimited);
    files.write("a/memory.max", "1000").write("a/memory.current", "600");
    CHECK(memory_left(files, "0::/a/b\n") == 400);
    files.write("memory.max", "5000").write("memory.current", "4900");
    CHECK(memory_left(files, "0::/a/b\n") == 100);
    CHECK(memory_left(files, "0::/not/seen/inside\n") == 100);
    files.write("a/b/memory.max", "50");  // set below what is in use
    CHECK(memory_left(files, "0::/a/b\n") == 0);
}

TEST_CASE("Memory: page cache of a cgroup is as good as free, at each level its own") {
    fake_files files;
    files.write("a/b/memory.max", "2000").write("a/b/memory.current", "1900");
    files.write("a/b/memory.stat", "anon 200\nfile 1700\nactive_file 100\ninactive_file 1600\nslab 5");
    CHECK(memory_left(files, "0::/a/b\n") == 1700);
    files.write("a/memory.max", "3000").write("a/memory.current", "2500").write("a/memory.stat", "inactive_file 100");
    CHECK(memory_left(files, "0::/a/b\n") == 600);
    files.write("a/memory.stat", "inactive_file 9999");  // read at another moment than the usage
    CHECK(memory_left(files, "0::/a/b\n") == 1700);
    files.write("a/memory.stat", "inactive_file");
    CHECK(memory_left(files, "0::/a/b\n") == 500);
}

TEST_CASE("Memory: where the kernel begins to swap is a limit too") {
    fake_files files;
    files.write("a/memory.max", "2000").write("a/memory.high", "1500").write("a/memory.current", "1000");
    CHECK(memory_left(files, "0::/a\n") == 500);
    files.write("a/memory.max", "max");
    CHECK(memory_left(files, "0::/a\n") == 500);
    files.write("a/memory.high", "max");
    CHECK(memory_left(files, "0::/a\n") == unlimited);
}

TEST_CASE("Memory: cgroup v1") {
    fake_files files;
    const std::string membership = "4:memory:/a/b\n1:cpu:/\n0::/\n";
    files.write("memory/memory.limit_in_bytes", "9223372036854771712").write("memory/memory.usage_in_bytes", "5000");
    CHECK(memory_left(files, membership) > std::uint64_t{1} << 60);
    files.write("memory/a/memory.limit_in_bytes", "4000").write("memory/a/memory.usage_in_bytes", "3500");
    CHECK(memory_left(files, membership) == 500);
    files.write("memory/a/memory.stat", "inactive_file 7\ntotal_inactive_file 300");  // the usage counts cgroups below it
    CHECK(memory_left(files, membership) == 800);
    CHECK(memory_left(files, "4:memory:/\n") > std::uint64_t{1} << 60);
}

TEST_CASE("This machine's own answers") {
    CHECK(usable_cores() >= 1);
    CHECK(usable_cores() <= std::max<std::size_t>(1, detail::cpus_of_thread().size()));
    const std::uint64_t memory = available_host_memory();
    CHECK(memory > 0);
    CHECK(memory < std::uint64_t{1} << 50);
    CHECK(thread_pool().size() == usable_cores());
}

TEST_CASE("A thread is kept on some of its CPUs, and what it starts counts these alone") {
    const std::vector<int> all = detail::cpus_of_thread();
    if (all.size() < 2) {
        MESSAGE("SKIPPED: needs two CPUs");
        return;
    }
    fake_files nodes;
    nodes.write("node0/cpulist", std::to_string(all[1]) + ",100000").write("node1/cpulist", std::to_string(all[0]));
    nodes.write("node2/cpulist", "100000").write("node3/cpulist", std::to_string(all.front()) + "-" + std::to_string(all.back()));
    using list = std::vector<int>;
    on_a_thread([&] {
        for (const int node : {-1, 2, 3, 4}) {  // not known, no CPU of this thread, all of them, not there
            CAPTURE(node);
            CHECK_FALSE(detail::keep_thread_in(node, 1, nodes.root()));
            CHECK(detail::cpus_of_thread() == all);
        }
        CHECK_FALSE(detail::keep_thread_in(0, 2, nodes.root()));  // too few of them
        CHECK(detail::cpus_of_thread() == all);

        CHECK(detail::keep_thread_in(0, 1, nodes.root()));
        CHECK(detail::cpus_of_thread() == list{all[1]});
        CHECK(usable_cores() == 1);
        CHECK(thread_pool().size() == 1);
        on_a_thread([&] { CHECK(detail::cpus_of_thread() == list{all[1]}); });

        for (const int node : {0, 1, 3}) {  // there already, the other one, and never back to all
            CAPTURE(node);
            CHECK_FALSE(detail::keep_thread_in(node, 0, nodes.root()));
            CHECK(detail::cpus_of_thread() == list{all[1]});
        }
    });
    on_a_thread([&] {
        CHECK(detail::keep_thread_on({all[0], 100000, all[0]}, 1));
        CHECK(detail::cpus_of_thread() == list{all[0]});
        CHECK_FALSE(detail::keep_thread_on({}, 0));
        CHECK(detail::cpus_of_thread() == list{all[0]});
    });
    CHECK(detail::cpus_of_thread() == all);
}

TEST_CASE("No device, no binding") {
    on_a_thread([] {
        const std::vector<int> before = detail::cpus_of_thread();
        CHECK_FALSE(keep_thread_near(-1));
        CHECK_FALSE(keep_thread_near(1 << 20));
        CHECK(detail::cpus_of_thread() == before);
    });
}

}  // namespace
