// Sentence splitting (mdata_cpp/punkt.hpp) on any code points: whatever the text, nothing of it is lost but white space.
//
// The first byte chooses the mode and how bytes become code points: as they are, or as numbers of awkward ones. The
// sentences must follow each other, leave out white space only, and be the same for every width that holds the text.
// That they are NLTK's is tested from Python. Built with libFuzzer where clang is, else with fuzz/driver.cpp.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "input.hpp"
#include "punkt.hpp"

namespace {

namespace punkt = mdata::punkt;
using Spans = std::vector<punkt::Span>;

constexpr char32_t kAwkward[] = {
    U'.', U'.', U'?', U'!', U' ', U' ', U'\n', U'\t', U'\x1C', U'\x85', U'\xA0', U'\u2028', U'\u3000', U'"', U'\'', U')', U'(',
    U']', U'}', U'[', U'{', U':', U';', U'*', U'@', U',', U'-', U'-', U'`', U'#', U'&', U'\u2018', U'\u201D', U'\xAB', U'\xBB',
    U'a', U'A', U'b', U'B', U'1', U'0', U'_', U'\u0130', U'\u03A3', U'\u03C3', U'\u0391', U'\u0301', U'\u0663', U'\u4E00',
    U'\u01C5', U'\U0001F600', U'\U0001FAE8', U'\U00010400', 0xD800, 0x10FFFF, 0,
};

const punkt::Tables& tables() {
    static const punkt::Tables made = [] {
        punkt::Tables tables;
        for (const char32_t* word : {U"a", U"aa", U"b", U". . ", U"\u03B1\u03C2", U"i\u0307", U"1"}) tables.add_abbreviation(word);
        for (const char32_t* word : {U"b", U"ab", U"\u03C3"}) tables.add_starter(word);
        std::uint8_t bits = 0;
        for (const char32_t* word : {U"a", U"ba", U"b", U"bb", U"\u03B1", U"##number##", U"i\u0307"}) {
            bits = static_cast<std::uint8_t>((bits * 5 + 34) & 126);
            tables.add_context(word, bits);
        }
        tables.add_collocation(U"a", U"ba");
        tables.add_collocation(U"##number##", U"a");
        tables.add_collocation(U".", U"b");
        return tables;
    }();
    return made;
}

template <typename Char>
Spans split(const std::vector<char32_t>& text, bool keep, const punkt::Newer& newer) {
    std::vector<Char> narrow;
    for (const char32_t c : text) narrow.push_back(static_cast<Char>(c));
    punkt::Splitter<Char> splitter(tables(), newer, keep);
    Spans found;
    splitter.split(narrow, 7, found);
    // A second text through the same splitter is not changed by the first.
    Spans again;
    splitter.split(narrow, 7, again);
    REQUIRE(found.size() == again.size());
    return found;
}

bool is_white(char32_t c) { return (punkt::class_of(c) & (punkt::kSpace | punkt::kStripped)) != 0; }

void check(const std::vector<char32_t>& text, bool keep, const punkt::Newer& newer) {
    const Spans found = split<char32_t>(text, keep, newer);
    std::size_t last = 7;
    for (const auto [start, stop] : found) {
        REQUIRE(last <= start && start < stop && stop <= text.size() + 7);
        for (std::size_t i = last; i < start; ++i) REQUIRE(is_white(text[i - 7]));
        last = stop;
    }
    for (std::size_t i = last; i < text.size() + 7; ++i) REQUIRE(is_white(text[i - 7]));

    const char32_t largest = text.empty() ? 0 : *std::max_element(text.begin(), text.end());
    const auto same = [&](const Spans& other) {
        REQUIRE(std::equal(found.begin(), found.end(), other.begin(), other.end(), [](const auto& a, const auto& b) {
            return a.start == b.start && a.stop == b.stop;
        }));
    };
    if (largest < 0x10000) same(split<std::uint16_t>(text, keep, newer));
    if (largest < 0x100) same(split<std::uint8_t>(text, keep, newer));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const std::uint8_t choice = data[0];
    std::vector<char32_t> text;
    for (std::size_t i = 1; i < size; ++i) text.push_back(choice & 2 ? kAwkward[data[i] % std::size(kAwkward)] : data[i]);
    punkt::Newer newer;
    if (choice & 4) newer[U'\U0001FAE8'] = {data[0], U"a\U0001FAE8"};
    check(text, choice & 1, newer);
    return 0;
}
