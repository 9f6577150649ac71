// Helpers: every part once, two at a time, for callers that come together, and in a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "check.hpp"
#include "helpers.hpp"

namespace {

using mdata::Helpers;
using namespace std::chrono_literals;

bool each_part_once(std::size_t parts, std::size_t helpers) {
    std::vector<std::atomic<int>> seen(parts);
    Helpers::shared().share(parts, helpers, [&](std::size_t part) noexcept { ++seen[part]; });
    return std::all_of(seen.begin(), seen.end(), [](const auto& times) { return times == 1; });
}

// Whether both parts of some work were begun before either was finished: each waits for the other.
bool two_at_a_time() {
    std::atomic<int> begun{0}, met{0};
    Helpers::shared().share(2, 1, [&](std::size_t) noexcept {
        ++begun;
        const auto end = std::chrono::steady_clock::now() + 20s;
        while (begun < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        met += begun == 2;
    });
    return met == 2;
}

void every_part_is_done_once() {
    for (const std::size_t helpers : {0u, 1u, 3u, 1000u}) {
        for (const std::size_t parts : {0u, 1u, 2u, 7u, 65535u, 70000u}) CHECK(each_part_once(parts, helpers));
    }
    bool all = true;
    for (int i = 0; i < 20000; ++i) all = each_part_once(static_cast<std::size_t>(i % 5), 2) && all;
    CHECK(all);
}

void a_helper_works_beside_the_caller_awake_or_asleep() {
    CHECK(two_at_a_time());
    CHECK(two_at_a_time());
    std::this_thread::sleep_for(20ms);
    CHECK(two_at_a_time());
}

void callers_that_come_together_are_all_served() {
    std::atomic<int> wrong{0};
    std::vector<std::jthread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int i = 0; i < 3000; ++i) wrong += !each_part_once(6, 2);
        });
    }
    callers.clear();
    CHECK(wrong == 0);
}

void a_child_has_helpers_of_its_own() {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(two_at_a_time() && each_part_once(100, 3) ? 0 : 1);
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(two_at_a_time());
}

}  // namespace

int main() {
    every_part_is_done_once();
    a_helper_works_beside_the_caller_awake_or_asleep();
    callers_that_come_together_are_all_served();
    a_child_has_helpers_of_its_own();
    return check::finish("helpers");
}
