// Punkt: sentences by hand, the same for every width of code points, long texts that would take quadratic time, and
// the table of characters. Equality with NLTK is tested from Python (tests/mdata/sentences).
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "punkt.hpp"

namespace {

namespace punkt = mdata::punkt;
using Texts = std::vector<std::u32string>;

punkt::Tables tables() {
    punkt::Tables tables;
    for (const char32_t* word : {U"mr", U"e.g", U"st", U"\u03bf\u03c2"}) tables.add_abbreviation(word);
    tables.add_starter(U"he");
    tables.add_context(U"then", 34);
    tables.add_context(U"who", 64);
    tables.add_collocation(U"st", U"then");
    return tables;
}

template <typename Char>
std::vector<punkt::Span> spans(const std::u32string& text, bool keep, const punkt::Newer& newer, bool& unsure) {
    const punkt::Tables words = tables();
    const std::vector<Char> narrow(text.begin(), text.end());
    punkt::Splitter<Char> splitter(words, newer, keep);
    std::vector<punkt::Span> found;
    splitter.split(narrow, 0, found);
    unsure = splitter.unsure();
    return found;
}

Texts split(const std::u32string& text, bool keep = false, const punkt::Newer& newer = {}) {
    bool unsure = false;
    const auto found = spans<char32_t>(text, keep, newer, unsure);
    char32_t largest = 0;
    for (const char32_t c : text) largest = std::max(largest, c);
    const auto same = [&](const std::vector<punkt::Span>& other) {
        CHECK(other.size() == found.size());
        for (std::size_t i = 0; i < std::min(other.size(), found.size()); ++i) {
            CHECK(other[i].start == found[i].start && other[i].stop == found[i].stop);
        }
    };
    if (largest < 0x100) same(spans<std::uint8_t>(text, keep, newer, unsure));
    if (largest < 0x10000) same(spans<std::uint16_t>(text, keep, newer, unsure));
    Texts sentences;
    for (const auto [start, stop] : found) sentences.push_back(text.substr(start, stop - start));
    return sentences;
}

void sentences() {
    CHECK(split(U"").empty());
    CHECK(split(U" \n\x1c").empty());
    CHECK(split(U".") == Texts{U"."});
    CHECK((split(U"One. Two? Three!") == Texts{U"One.", U"Two?", U"Three!"}));
    CHECK((split(U"One.\n\nTwo.", true) == Texts{U"One.\n\n", U"Two."}));
    CHECK((split(U"He (x.) went. \u201cNo.\u201d Yes") == Texts{U"He (x.)", U"went.", U"\u201cNo.\u201d", U"Yes"}));
    CHECK((split(U"Bad!!! Then") == Texts{U"Bad!!!", U"Then"}));
    CHECK(split(U"St. Then") == Texts{U"St. Then"});
    CHECK((split(U"Mr. Then Mr. Smith. Mr. He") == Texts{U"Mr.", U"Then Mr. Smith.", U"Mr.", U"He"}));
    CHECK(split(U"A. Bach e.g. who 3. who") == Texts{U"A. Bach e.g. who 3. who"});
    CHECK(split(U"\u039f\u03a3. Smith") == Texts{U"\u039f\u03a3. Smith"});
    CHECK((split(U"One.\x1cTwo. Then") == Texts{U"One.\x1cTwo.", U"Then"}));
}

void characters_that_are_newer() {
    const std::u32string text = U"\U0001FAE8. Bach";
    bool unsure = false;
    (void)spans<char32_t>(text, false, {}, unsure);
    CHECK(unsure);
    const punkt::Newer letter{{U'\U0001FAE8', {punkt::kLetter, U"\U0001FAE8"}}};
    (void)spans<char32_t>(text, false, letter, unsure);
    CHECK(!unsure);
    CHECK(split(text, false, letter) == Texts{text});
    const punkt::Newer other{{U'\U0001FAE8', {0, U"\U0001FAE8"}}};
    CHECK((split(text, false, other) == Texts{U"\U0001FAE8.", U"Bach"}));
}

void long_texts() {
    const std::u32string units[] = {U".", U"!", U"1", U"-", U"\"", U"a", U" ", U"a?b", U"a.", U". ", U".\u00A0", U"x-.",
                                    U"\u03a3.", U"'\u03a3", U"\U0001F600.)", U"\n", U"A. ", U".\n)"};
    for (const std::u32string& unit : units) {
        std::u32string text;
        while (text.size() < 300'000) text += unit;
        text += U" Then.";
        for (const bool keep : {false, true}) {
            bool unsure = false;
            const auto found = spans<char32_t>(text, keep, {}, unsure);
            CHECK(!found.empty() && found.back().stop == text.size());
            std::size_t last = 0;
            bool ordered = true;
            for (const auto [start, stop] : found) {
                ordered = ordered && last <= start && start < stop;
                last = stop;
            }
            CHECK(ordered);
        }
    }
}

void characters() {
    CHECK(punkt::kind_of(U'A').flags == (punkt::kUpper | punkt::kLetter | punkt::kCased) && punkt::kind_of(U'A').to_lower == 32);
    CHECK(punkt::kind_of(U'7').flags == punkt::kDigit);
    CHECK(punkt::kind_of(U'.').flags == punkt::kIgnorable);
    CHECK(punkt::kind_of(0).flags == 0);
    CHECK(punkt::kind_of(0x10FFFF).flags == punkt::kNewer);
}

}  // namespace

int main() {
    sentences();
    characters_that_are_newer();
    long_texts();
    characters();
    return check::finish("punkt");
}
