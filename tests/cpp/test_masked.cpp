// The sentence mapping: a hand-made document, 64-bit rows, parts of the keyed form, and documents that are no documents.
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "keyed.hpp"
#include "mapping.hpp"

namespace {

using mdata::Key128;
using mdata::MappingRule;
using Rows = std::vector<mdata::MappingRow<std::uint32_t>>;
using WideRows = std::vector<mdata::MappingRow<std::uint64_t>>;

void a_document_is_cut_at_its_target_and_leaves_no_single_sentence() {
    const std::vector<std::int64_t> boundaries{0, 6, 6, 7};
    const std::vector<std::int32_t> sizes{5, 5, 5, 5, 5, 5, 600};
    const Rows rows = mdata::keyed_mapping<std::uint32_t>({10, 0, 1}, boundaries, sizes, {}, 0);
    CHECK((rows == Rows{{0, 2, 10}, {2, 4, 10}, {4, 6, 10}, {6, 7, 10}}));
    const Rows long_ones = mdata::keyed_mapping<std::uint32_t>({20, 0, 2}, boundaries, sizes, {}, 0);
    CHECK((long_ones == Rows{{0, 4, 20}, {4, 6, 20}}));
}

void the_numbers_of_rows_have_the_width_asked_for() {
    std::mt19937 random(3);
    std::vector<std::int64_t> boundaries{0};
    std::vector<std::int32_t> sizes;
    for (int d = 0; d < 300; ++d) {
        for (auto n = random() % 9; n > 0; --n) sizes.push_back(static_cast<std::int32_t>(random() % 20));
        boundaries.push_back(static_cast<std::int64_t>(sizes.size()));
    }
    const MappingRule rule{30, 3, 1};
    const Rows narrow = mdata::megatron_mapping<std::uint32_t>(rule, boundaries, sizes, 5, 1000, 7);
    const WideRows wide = mdata::megatron_mapping<std::uint64_t>(rule, boundaries, sizes, 5, 1000, 7);
    CHECK(narrow.size() >= 1000 && narrow.size() == wide.size());
    for (std::size_t i = 0; i < narrow.size(); ++i) {
        CHECK(narrow[i].first == wide[i].first && narrow[i].stop == wide[i].stop && narrow[i].target == wide[i].target);
    }
}

void a_corpus_without_a_usable_document_ends() {
    const std::vector<std::int64_t> boundaries{0, 1, 3};
    const std::vector<std::int32_t> sizes{4, 513, 2};
    CHECK(mdata::megatron_mapping<std::uint32_t>({9, 0, 2}, boundaries, sizes, ~std::uint64_t{0}, 10, 1).empty());
    CHECK(mdata::megatron_mapping<std::uint32_t>({9, 0, 1}, {}, {}, ~std::uint64_t{0}, 10, 1).empty());
}

void documents_outside_are_refused() {
    const std::vector<std::int32_t> sizes{4, 5};
    for (const std::vector<std::int64_t>& wrong :
         {std::vector<std::int64_t>{0, 3}, {-1, 1}, {2, 1}, {0, 2, 1}, {INT64_MIN, INT64_MAX}}) {
        CHECK_THROWS(std::out_of_range, mdata::keyed_mapping<std::uint32_t>({9, 2, 1}, wrong, sizes, {}, 0));
    }
}

void streams_of_other_numbers_and_keys_differ() {
    const auto words = [](Key128 key, std::uint64_t number) {
        mdata::KeyedStream stream(key, number);
        std::vector<std::uint32_t> found(9);
        for (auto& word : found) word = stream.next();
        return found;
    };
    const auto one = words({1, 2}, 3);
    CHECK(one == words({1, 2}, 3));
    for (const auto& other : {words({1, 2}, 4), words({1, 2}, std::uint64_t{3} << 32U), words({1, 3}, 3), words({5, 2}, 3)}) {
        CHECK(one != other);
    }
}

}  // namespace

int main() {
    a_document_is_cut_at_its_target_and_leaves_no_single_sentence();
    the_numbers_of_rows_have_the_width_asked_for();
    a_corpus_without_a_usable_document_ends();
    documents_outside_are_refused();
    streams_of_other_numbers_and_keys_differ();
    return check::finish("masked");
}
