// What BERT and T5 samples are made by (mdata_cpp/mapping.hpp, masking.hpp, masked_samples.hpp, masked_rows.hpp) and the
// packing of documents (packing.hpp), over sentences, vocabularies, rules and forms of any content.
//
// Arrays lie in buffers of just their size, so that the sanitizers see every access outside. What is not refused by an
// exception keeps what its header promises: rows that are runs of sentences in order, samples that can be put together
// to the text again, packed rows that have every token once. Built with libFuzzer where clang is, else with driver.cpp.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "input.hpp"
#include "mapping.hpp"
#include "masked_rows.hpp"
#include "masked_samples.hpp"
#include "packing.hpp"

namespace {

using Numbers = std::vector<std::int64_t>;
using Sizes = std::vector<std::int32_t>;

constexpr std::int64_t kUnwritten = INT64_MIN + 7;
constexpr std::size_t kMostCells = 1 << 14;

class Input : public ByteSource {
public:
    using ByteSource::ByteSource;

    Sizes sizes(std::size_t most) {
        Sizes found(byte() % (most + 1));
        for (auto& value : found) value = static_cast<std::int32_t>(number());
        return found;
    }
};

template <typename Row>
void runs_of_sentences(const std::vector<Row>& rows, const mdata::MappingRule& rule, std::size_t sentences) {
    for (const Row& row : rows) {
        REQUIRE(row.first < row.stop && row.stop <= sentences);
        REQUIRE(row.target >= 2 && static_cast<std::int64_t>(row.target) <= rule.longest);
    }
}

void mapped(Input& input) {
    const Sizes sizes = input.sizes(60);
    const bool sound = input.byte() & 1;
    Numbers boundaries = input.numbers(20);
    if (sound) {
        for (auto& boundary : boundaries) boundary = std::clamp<std::int64_t>(boundary, 0, static_cast<std::int64_t>(sizes.size()));
        std::sort(boundaries.begin(), boundaries.end());
    }
    const mdata::MappingRule rule{2 + (input.number() & 0x3FFFFFFF), static_cast<std::uint64_t>(input.number()),
                                  1 + (input.number() & 0x3FFFFFFF)};
    const auto seed = static_cast<std::uint32_t>(input.number());
    const mdata::Key128 key{static_cast<std::uint64_t>(input.number()), static_cast<std::uint64_t>(input.number())};
    const auto first_document = static_cast<std::uint64_t>(input.number());
    try {
        const auto epochs = static_cast<std::uint64_t>(input.number());
        const auto narrow = mdata::megatron_mapping<std::uint32_t>(rule, boundaries, sizes, epochs, input.byte(), seed);
        runs_of_sentences(narrow, rule, sizes.size());
    } catch (const std::exception&) {
        REQUIRE(!sound);
    }
    try {
        const auto rows = mdata::keyed_mapping<std::uint64_t>(rule, boundaries, sizes, key, first_document);
        runs_of_sentences(rows, rule, sizes.size());
        for (std::size_t i = 1; sound && i < rows.size(); ++i) REQUIRE(rows[i - 1].stop <= rows[i].first);
        std::vector<mdata::MappingRow<std::uint64_t>> parts;
        for (std::size_t d = 0; d + 1 < boundaries.size(); ++d) {
            const auto part = mdata::keyed_mapping<std::uint64_t>(rule, std::span(boundaries).subspan(d, 2), sizes, key, first_document + d);
            parts.insert(parts.end(), part.begin(), part.end());
        }
        REQUIRE(rows == parts);
    } catch (const std::exception&) {
        REQUIRE(!sound);
    }
}

void packed(Input& input) {
    Numbers lengths = input.numbers(40);
    for (auto& length : lengths) length = length > 4000 ? length % 4000 : length;
    // A tree of all rooms is made for each window, so long rows are few.
    const auto small = [&] { return static_cast<std::int32_t>(std::clamp<std::int64_t>(input.number() % 100'000, -5, 99'999)); };
    const std::int32_t row_length = small(), overlap = small(), least = small();
    const std::int64_t before = input.byte();
    mdata::Packed found;
    try {
        mdata::Packer(row_length, overlap, least).pack(lengths, before, found);
    } catch (const std::exception&) {
        REQUIRE(row_length < 1 || overlap < 0 || overlap >= row_length || least < 1 || least > row_length ||
                std::any_of(lengths.begin(), lengths.end(), [](auto length) { return length < 0; }));
        return;
    }
    REQUIRE(found.documents.size() == found.counts.size() && found.offsets.size() == found.counts.size());
    std::vector<std::vector<int>> seen;
    for (const std::int64_t length : lengths) seen.emplace_back(static_cast<std::size_t>(length));
    std::int64_t piece = 0;
    for (const std::int64_t end : found.row_ends) {
        REQUIRE(end > piece);
        std::int64_t used = 0;
        for (; piece < end; ++piece) {
            const auto p = static_cast<std::size_t>(piece);
            const std::int64_t d = found.documents[p] - before;
            REQUIRE(d >= 0 && static_cast<std::size_t>(d) < lengths.size() && found.counts[p] >= least && found.offsets[p] >= 0);
            REQUIRE(found.offsets[p] + found.counts[p] <= lengths[static_cast<std::size_t>(d)]);
            REQUIRE(found.offsets[p] == 0 || found.counts[p] > overlap);  // no piece of what others have
            for (std::int32_t t = 0; t < found.counts[p]; ++t) {
                ++seen[static_cast<std::size_t>(d)][static_cast<std::size_t>(found.offsets[p] + t)];
            }
            used += found.counts[p];
        }
        REQUIRE(used <= row_length);
    }
    REQUIRE(static_cast<std::size_t>(piece) == found.counts.size());
    for (const auto& tokens : seen) {
        // Only an end that is too short is left out, and what stands in several pieces is their overlap.
        const auto left_out = std::count(tokens.begin(), tokens.end(), 0);
        REQUIRE(left_out < std::max(least, 1) && std::find(tokens.begin(), tokens.end() - left_out, 0) == tokens.end() - left_out);
        REQUIRE(overlap > 0 || std::all_of(tokens.begin(), tokens.end(), [](int times) { return times <= 1; }));
    }
}

// Flat arrays of rows, which fit each other where the first byte says so.
struct Text {
    Numbers numbers, targets, ends, tokens;
    Sizes sizes;

    explicit Text(Input& input) {
        const bool sound = input.byte() & 1;
        sizes = input.sizes(24);
        if (sound) {
            for (auto& size : sizes) size = static_cast<std::int32_t>(static_cast<std::uint32_t>(size) % 40);
        }
        std::int64_t all = 0;
        for (const std::int32_t size : sizes) all += std::clamp(size, 0, 64);
        tokens.resize(static_cast<std::size_t>(sound ? all : all + input.byte() % 3 - (all > 0 ? 1 : 0)));
        for (auto& token : tokens) token = input.number();
        ends = input.numbers(4);
        if (sound) {
            for (auto& end : ends) end = std::clamp<std::int64_t>(end, 0, static_cast<std::int64_t>(sizes.size()));
            std::sort(ends.begin(), ends.end());
            if (ends.empty()) ends.push_back(0);
            ends.back() = static_cast<std::int64_t>(sizes.size());
        }
        numbers.resize(sound ? ends.size() : input.byte() % 4);
        targets.resize(sound ? ends.size() : input.byte() % 4);
        for (auto& value : numbers) value = input.number();
        for (auto& value : targets) value = input.number();
    }
};

mdata::MaskVocabulary vocabulary_of(Input& input) {
    mdata::MaskVocabulary known{input.number(), input.number(), input.number(), {}, input.numbers(8)};
    known.continues.resize(input.byte() % 64);
    for (auto& flag : known.continues) flag = input.byte() & 1;
    if (known.ids.empty()) known.ids.push_back(9);
    return known;
}

mdata::MaskRule rule_of(Input& input) {
    const double probability = static_cast<double>(input.byte()) / 250.0 + (input.byte() & 1 ? 1e-9 : 0.0);
    const std::int64_t most = input.byte() & 1 ? input.number() : 1 + input.byte() % 12;
    const std::uint8_t flags = input.byte();
    return {probability, most, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0};
}

std::span<std::int64_t> cells(Numbers& all, std::size_t at, std::int64_t width) {
    return std::span(all).subspan(at * static_cast<std::size_t>(width), static_cast<std::size_t>(width));
}

void all_written(const Numbers& fields) { REQUIRE(std::find(fields.begin(), fields.end(), kUnwritten) == fields.end()); }

template <typename Generator>
void bert(const mdata::SampleText& text, const mdata::BertForm& form, const mdata::MaskVocabulary& known,
          const mdata::MaskRule& rule, mdata::BertSampler& sampler, Generator generator) {
    const std::int64_t q = form.length;
    Numbers fields(static_cast<std::size_t>(5 * q), kUnwritten);
    const auto ids = cells(fields, 0, q), types = cells(fields, 1, q), labels = cells(fields, 2, q), is_text = cells(fields, 3, q),
               asked = cells(fields, 4, q);
    std::array<std::int64_t, 2> flags{kUnwritten, kUnwritten};
    sampler.sample(text, generator, {ids, types, labels, is_text, asked, &flags[0], &flags[1]});
    all_written(fields);
    REQUIRE((flags[0] == 0 || (flags[0] == 1 && form.head)) && (flags[1] == 0 || flags[1] == 1));
    REQUIRE((flags[1] == 1) == (static_cast<std::int64_t>(text.tokens.size()) > text.target));
    if (form.padding.by_value) return;
    // Padding is known by place: text, types and labels end together.
    const auto used = static_cast<std::size_t>(std::count(is_text.begin(), is_text.end(), 1));
    const auto kept = std::min<std::int64_t>(static_cast<std::int64_t>(text.tokens.size()), text.target);
    REQUIRE(static_cast<std::int64_t>(used) >= kept + 2 && static_cast<std::int64_t>(used) <= kept + 3);
    Numbers before(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(used));
    for (std::size_t i = 0; i < ids.size(); ++i) {
        REQUIRE((asked[i] == 0 && labels[i] == -1) || (asked[i] == 1 && i < used));
        if (i >= used) REQUIRE(ids[i] == form.padding.pad && types[i] == 0 && is_text[i] == 0);
        if (i < used && asked[i] == 1) before[i] = labels[i];
    }
    if (rule.permute) return;
    // With the labels put back the tokens are those of the text, without what was dropped.
    Numbers source(text.tokens.begin(), text.tokens.end());
    source.insert(source.end(), {known.cls, known.sep, known.sep});
    std::sort(source.begin(), source.end());
    std::sort(before.begin(), before.end());
    REQUIRE(std::includes(source.begin(), source.end(), before.begin(), before.end()));
}

template <typename Generator>
void t5(const mdata::SampleText& text, const mdata::T5Form& form, const mdata::MaskVocabulary& known, mdata::T5Sampler& sampler,
        Generator generator) {
    const std::int64_t e = form.encoder_length, d = form.decoder_length;
    Numbers wide(static_cast<std::size_t>(2 * e), kUnwritten), narrow(static_cast<std::size_t>(4 * d), kUnwritten);
    std::int64_t truncated = kUnwritten;
    const auto encoder = cells(wide, 0, e), encoder_marks = cells(wide, 1, e), decoder = cells(narrow, 0, d), labels = cells(narrow, 1, d),
               asked = cells(narrow, 2, d), decoder_marks = cells(narrow, 3, d);
    const bool made = sampler.sample(text, generator, {encoder, decoder, labels, asked, encoder_marks, decoder_marks, &truncated});
    if (!made) {
        REQUIRE(form.padding.by_value && (sampler.spans() > form.sentinels.size() || sampler.cells() > decoder.size()));
        return;
    }
    all_written(wide);
    all_written(narrow);
    REQUIRE((truncated == 1) == (static_cast<std::int64_t>(text.tokens.size()) > text.target));
    if (form.padding.by_value) return;
    // The decoder's spans put in the places of their sentinels give the text, but for [CLS] and [SEP] inside of a span.
    const auto written = static_cast<std::size_t>(std::count(asked.begin(), asked.end(), 1));
    const auto read = static_cast<std::size_t>(std::count(encoder_marks.begin(), encoder_marks.end(), 1));
    const auto kept = static_cast<std::size_t>(std::min<std::int64_t>(static_cast<std::int64_t>(text.tokens.size()), text.target));
    REQUIRE(decoder[0] == form.bos && labels[written - 1] == form.eos);
    REQUIRE(std::equal(decoder.begin() + 1, decoder.begin() + static_cast<std::ptrdiff_t>(written), labels.begin()));
    const auto special = static_cast<std::size_t>(std::count_if(text.tokens.begin(), text.tokens.begin() + static_cast<std::ptrdiff_t>(kept),
                                                                [&](auto id) { return id == known.cls || id == known.sep; }));
    const std::size_t rebuilt = read + written - 1 - 2 * sampler.spans();
    REQUIRE(rebuilt <= kept && rebuilt + special >= kept);
    Numbers together(encoder.begin(), encoder.begin() + static_cast<std::ptrdiff_t>(read));
    together.insert(together.end(), decoder.begin() + 1, decoder.begin() + static_cast<std::ptrdiff_t>(written));
    Numbers source(text.tokens.begin(), text.tokens.begin() + static_cast<std::ptrdiff_t>(kept));
    for (std::size_t s = 0; s < sampler.spans(); ++s) source.insert(source.end(), 2, form.sentinels[s]);
    std::sort(together.begin(), together.end());
    std::sort(source.begin(), source.end());
    REQUIRE(std::includes(source.begin(), source.end(), together.begin(), together.end()));
}

void sampled(Input& input) {
    const Text text(input);
    const std::uint8_t flags = input.byte();
    const mdata::Padding padding{input.number(), (flags & 1) != 0};
    const mdata::BertForm bert_form{5 + (input.byte() % 120), (flags & 2) != 0, padding};
    const mdata::T5Form t5_form{4 + (input.byte() % 120), 1 + (input.byte() % 60), input.number(), input.number(), input.numbers(6), padding};
    const mdata::MaskVocabulary known = vocabulary_of(input);
    std::optional<mdata::MaskRule> rule;
    std::optional<mdata::MaskedRows> rows;
    try {
        rule.emplace(rule_of(input));
        rows.emplace(text.numbers, text.targets, text.ends, text.sizes, text.tokens);
    } catch (const std::exception&) {
        return;
    }
    REQUIRE(text.tokens.size() < kMostCells && rule->bounds.back() == 1.0);
    mdata::BertSampler bert_sampler(bert_form, known, *rule);
    mdata::T5Sampler t5_sampler(t5_form, known, *rule);
    rows->each([&](std::size_t, std::int64_t number, const mdata::SampleText& row) {
        const auto with = [&](auto generator) {
            try {
                bert(row, bert_form, known, *rule, bert_sampler, generator);
            } catch (const std::invalid_argument&) {
                REQUIRE(row.target < 0 || row.target > bert_form.length - 3 || (bert_form.head && row.sizes.size() < 2));
            }
            try {
                t5(row, t5_form, known, t5_sampler, generator);
            } catch (const std::invalid_argument&) {
                REQUIRE(row.target < 0 || row.target > t5_form.encoder_length - 2);
            }
        };
        if (flags & 4) with(mdata::Mersenne(static_cast<std::uint32_t>(number)));
        else with(mdata::KeyedStream({1, 2}, static_cast<std::uint64_t>(number)));
        return true;
    });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input(data, size);
    switch (input.byte() % 3) {
        case 0: mapped(input); break;
        case 1: packed(input); break;
        default: sampled(input);
    }
    return 0;
}
