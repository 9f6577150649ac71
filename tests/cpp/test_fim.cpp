// Rows rearranged under random rules: for the sanitizers, and for what must hold of every row.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "fim.hpp"

namespace {

using Row = std::vector<std::int64_t>;
constexpr std::int64_t kPrefix = 90, kMiddle = 91, kSuffix = 92, kEod = 93, kSplit = 94, kFill = -3;

bool is_name(std::int64_t id) { return id >= kPrefix && id <= kSuffix; }

Row sorted_text(const Row& row) {
    Row text;
    std::copy_if(row.begin(), row.end(), std::back_inserter(text), [](std::int64_t id) { return id < kPrefix; });
    std::sort(text.begin(), text.end());
    return text;
}

void every_token_of_text_stays() {
    std::mt19937 random(4);
    Row scratch;
    for (int round = 0; round < 2000; ++round) {
        const std::size_t count = random() % 60;
        Row row(300, -1);
        for (std::size_t i = 0; i < count; ++i) row[i] = random() % 6 == 0 ? kEod : random() % 6 == 0 ? kSplit : random() % 9;
        const Row before(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(count));
        mdata::FimRule rule{kPrefix, kMiddle, kSuffix, kEod, {}, {}, 0.5, 0.5, 0.5};
        if (random() % 2 == 0) rule.split = kSplit;
        if (random() % 3 == 0) rule.untouched = {static_cast<std::int64_t>(random() % 9)};
        const auto kept = mdata::fim_row(rule, {{1, 2}, random()}, row, count, 300, kFill, scratch);
        const Row after(row.begin(), row.begin() + kept);
        CHECK(sorted_text(after) == sorted_text(before));
        CHECK(std::count_if(after.begin(), after.end(), is_name) % 3 == 0);
        CHECK(std::all_of(row.begin() + kept, row.end(), [](std::int64_t id) { return id == kFill; }));
    }
}

void what_has_no_room_is_cut() {
    Row scratch;
    const mdata::FimRule always{kPrefix, kMiddle, kSuffix, kEod, {}, {}, 1.0, 0.0, 0.0};
    for (std::size_t limit = 0; limit <= 8; ++limit) {
        Row row{1, 2, 3, 4, 5, 6, 7, 8};
        CHECK(mdata::fim_row(always, {{1, 2}, 3}, row, 8, limit, kFill, scratch) == static_cast<std::int64_t>(limit));
        CHECK(limit == 0 || row[0] == kPrefix);
        CHECK(limit == 8 || row[limit] == kFill);
    }
    Row none{5};
    CHECK(mdata::fim_row(always, {{1, 2}, 3}, none, 0, 1, kFill, scratch) == 1 && none[0] == kPrefix);
}

}  // namespace

int main() {
    every_token_of_text_stays();
    what_has_no_room_is_cut();
    return check::finish("fim");
}
