// The sentence mapping (a hand-made document, 64-bit rows, parts of the keyed form, documents that are none), and whole
// samples of BERT and T5: random texts under all rules, for the sanitizers and for what must hold of every sample.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "keyed.hpp"
#include "mapping.hpp"
#include "masked_samples.hpp"

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

// Ids 0 to 49; every third from 9 on continues a word; 2 and 3 are special, 4 is the mask, 50 on are sentinels.
mdata::MaskVocabulary vocabulary() {
    mdata::MaskVocabulary made{2, 3, 4, std::vector<std::uint8_t>(40, 0), {}};
    for (std::size_t id = 9; id < 40; id += 3) made.continues[id] = 1;
    for (std::int64_t id = 0; id < 50; ++id) made.ids.push_back(id);
    return made;
}

struct RandomText {
    std::vector<std::int32_t> sizes;
    std::vector<std::int64_t> tokens;

    RandomText(std::mt19937& random, std::size_t sentences) {
        for (std::size_t s = 0; s < sentences; ++s) {
            sizes.push_back(static_cast<std::int32_t>(random() % 4 == 0 ? 0 : random() % 20));
            for (std::int32_t i = 0; i < sizes.back(); ++i) tokens.push_back(static_cast<std::int64_t>(random() % 50));
        }
    }
};

std::vector<mdata::MaskRule> rules() {
    std::vector<mdata::MaskRule> made;
    for (const double p : {0.01, 0.15, 0.6, 0.999}) {
        for (const std::int64_t most : {1, 3, 10, 300}) {
            for (int kind = 0; kind < 4; ++kind) made.emplace_back(p, most, most != 3, kind == 1, kind == 2, kind == 3);
        }
    }
    return made;
}

template <typename Generator>
void bert_samples_hold_together(Generator&& generator_of) {
    std::mt19937 random(5);
    const auto known = vocabulary();
    for (const auto& rule : rules()) {
        for (std::int64_t q = 5; q < 60; q += 9) {
            const mdata::BertForm form{q, q % 2 == 0, {17, q % 4 == 0}};
            mdata::BertSampler sampler(form, known, rule);
            for (std::uint64_t k = 0; k < 6; ++k) {
                const RandomText text(random, 2 + random() % 5);
                const auto target = static_cast<std::int64_t>(random() % static_cast<unsigned>(q - 2));
                std::vector<std::int64_t> fields(static_cast<std::size_t>(5 * q), -77);
                const auto field = [&](std::int64_t i) {
                    return std::span(fields).subspan(static_cast<std::size_t>(i * q), static_cast<std::size_t>(q));
                };
                std::int64_t is_random = -77, truncated = -77;
                auto generator = generator_of(k);
                sampler.sample({text.sizes, text.tokens, target}, generator,
                               {field(0), field(1), field(2), field(3), field(4), &is_random, &truncated});
                CHECK(std::find(fields.begin(), fields.end(), -77) == fields.end());
                const auto asked = std::count(field(4).begin(), field(4).end(), 1);
                CHECK(static_cast<double>(asked) <= 2 * std::max(1.0, rule.probability * static_cast<double>(q) + 1));
                CHECK(truncated == (static_cast<std::int64_t>(text.tokens.size()) > target ? 1 : 0));
                CHECK(form.head || is_random == 0);
            }
        }
    }
}

void t5_samples_have_room_or_say_so() {
    std::mt19937 random(6);
    const auto known = vocabulary();
    int without_room = 0;
    for (const auto& rule : rules()) {
        for (std::int64_t q = 4; q < 60; q += 7) {
            for (const bool by_value : {false, true}) {
                const auto d = static_cast<std::int64_t>(1 + random() % 30);
                const mdata::T5Form form{q, d, 5, 6, {50, 51, 52}, {0, by_value}};
                mdata::T5Sampler sampler(form, known, rule);
                const RandomText text(random, 1 + random() % 5);
                std::vector<std::int64_t> wide(static_cast<std::size_t>(2 * q), -77), narrow(static_cast<std::size_t>(4 * d), -77);
                const auto part = [](std::vector<std::int64_t>& all, std::int64_t i, std::int64_t width) {
                    return std::span(all).subspan(static_cast<std::size_t>(i * width), static_cast<std::size_t>(width));
                };
                std::int64_t truncated = -77;
                mdata::Mersenne generator(static_cast<std::uint32_t>(q));
                const bool made = sampler.sample(
                    {text.sizes, text.tokens, q - 2}, generator,
                    {part(wide, 0, q), part(narrow, 0, d), part(narrow, 1, d), part(narrow, 2, d), part(wide, 1, q),
                     part(narrow, 3, d), &truncated});
                CHECK(made || by_value);
                without_room += made ? 0 : 1;
                if (!made) continue;
                CHECK(std::find(wide.begin(), wide.end(), -77) == wide.end());
                CHECK(std::find(narrow.begin(), narrow.end(), -77) == narrow.end());
            }
        }
    }
    CHECK(without_room > 10);
}

void samples_without_sense_are_refused() {
    const auto known = vocabulary();
    const mdata::MaskRule rule(0.15, 3, true, false, false, false);
    std::int64_t number = 0;
    std::vector<std::int64_t> row(8);
    const mdata::BertFields fields{row, row, row, row, row, &number, &number};
    mdata::Mersenne generator(1);
    const std::vector<std::int32_t> one{3}, two{2, 1};
    const std::vector<std::int64_t> tokens{9, 10, 11};
    mdata::BertSampler sampler({8, true, {0, false}}, known, rule);
    CHECK_THROWS(std::invalid_argument, sampler.sample({one, tokens, 5}, generator, fields));
    CHECK_THROWS(std::invalid_argument, sampler.sample({two, tokens, 6}, generator, fields));
    CHECK_THROWS(std::invalid_argument, sampler.sample({two, tokens, -1}, generator, fields));
    CHECK_THROWS(std::invalid_argument, mdata::MaskRule(0.0, 3, true, false, false, false));
    CHECK_THROWS(std::invalid_argument, mdata::MaskRule(0.5, 0, true, false, false, false));
    CHECK_THROWS(std::invalid_argument, mdata::MaskRule(0.5, 3, true, false, true, true));
}

}  // namespace

int main() {
    a_document_is_cut_at_its_target_and_leaves_no_single_sentence();
    the_numbers_of_rows_have_the_width_asked_for();
    a_corpus_without_a_usable_document_ends();
    documents_outside_are_refused();
    streams_of_other_numbers_and_keys_differ();
    bert_samples_hold_together([](std::uint64_t k) { return mdata::KeyedStream({1, 2}, k); });
    bert_samples_hold_together([](std::uint64_t k) { return mdata::Mersenne(static_cast<std::uint32_t>(k)); });
    t5_samples_have_room_or_say_so();
    samples_without_sense_are_refused();
    return check::finish("masked");
}
