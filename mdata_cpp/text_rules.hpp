// Rules on web text: words, the measures of Gopher (Rae et al. 2021), FineWeb (Penedo et al. 2024) and C4 (Raffel et
// al. 2020), and texts that need no repair.
//
// The arithmetic is datatrove's for the same words; the words are our own. A measure is a number, which the caller
// compares with a threshold. All are pure functions of a text, which is UTF-8 that Python made.
// Slow twins: tests/reference/text_rules.py.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "minhash.hpp"
#include "text_classes.hpp"
#include "utf8.hpp"

namespace mdata::text {

// The classes of every code point as one table.
inline const std::vector<std::uint8_t>& class_table() {
    static const std::vector<std::uint8_t> table = [] {
        std::vector<std::uint8_t> classes(0x110000);
        for (std::size_t run = 0; run < std::size(kClassRuns); ++run) {
            const std::size_t end = run + 1 < std::size(kClassRuns) ? kClassRuns[run + 1] >> 8 : classes.size();
            std::fill(classes.begin() + (kClassRuns[run] >> 8), classes.begin() + static_cast<std::ptrdiff_t>(end),
                      static_cast<std::uint8_t>(kClassRuns[run] & 255U));
        }
        return classes;
    }();
    return table;
}

inline unsigned classes_of(std::uint32_t code) { return class_table()[code]; }

inline std::size_t characters_of(std::string_view text) {
    return static_cast<std::size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

inline std::string_view left_stripped(std::string_view text) {
    while (!text.empty()) {
        const Code code = code_at(text, 0);
        if (!(classes_of(code.value) & kSpace)) break;
        text.remove_prefix(code.size);
    }
    return text;
}

inline std::string_view right_stripped(std::string_view text) {
    while (!text.empty()) {
        const std::size_t at = last_code_begin(text);
        if (!(classes_of(code_at(text, at).value) & kSpace)) break;
        text.remove_suffix(text.size() - at);
    }
    return text;
}

inline std::string_view stripped(std::string_view text) { return right_stripped(left_stripped(text)); }

// The lines of str.splitlines.
template <typename Take>
void for_each_line(std::string_view text, Take&& take) {
    std::size_t begin = 0, at = 0;
    while (at < text.size()) {
        const auto lead = static_cast<unsigned char>(text[at]);
        std::size_t size = 0;
        if ((lead >= 0x0A && lead <= 0x0D) || (lead >= 0x1C && lead <= 0x1E)) {
            size = lead == '\r' && at + 1 < text.size() && text[at + 1] == '\n' ? 2 : 1;
        } else if (lead == 0xC2 && text[at + 1] == '\x85') {
            size = 2;
        } else if (lead == 0xE2 && text[at + 1] == '\x80' && (text[at + 2] == '\xA8' || text[at + 2] == '\xA9')) {
            size = 3;
        }
        if (size) {
            take(text.substr(begin, at - begin));
            begin = at + size;
        }
        at += size ? size : 1;
    }
    if (begin < text.size()) take(text.substr(begin));
}

// The parts between separators of at least `least` newlines, as re.split of "\n{least,}".
template <typename Take>
void for_each_between(std::string_view text, std::size_t least, Take&& take) {
    std::size_t begin = 0, at = 0;
    while ((at = text.find('\n', at)) != std::string_view::npos) {
        std::size_t end = at;
        while (end < text.size() && text[end] == '\n') ++end;
        if (end - at >= least) {
            take(text.substr(begin, at - begin));
            begin = end;
        }
        at = end;
    }
    take(text.substr(begin));
}

struct Word {
    std::uint32_t begin, end;  // bytes
    std::uint32_t characters;
    bool symbol;  // nothing but punctuation and control characters
    bool alpha;   // has a letter
};

inline void check_size(std::string_view text) {
    if (text.size() >= std::uint64_t{1} << 32) throw std::overflow_error("a text of 4 GiB or more");
}

// Words: runs of letters, marks, numbers and connectors, with an apostrophe between letters and a full stop or comma
// between digits; and runs of one other character that is no blank.
inline void split_words(std::string_view text, std::vector<Word>& words) {
    check_size(text);
    words.clear();
    const auto& table = class_table();
    for (std::size_t at = 0; at < text.size();) {
        Code code = code_at(text, at);
        unsigned classes = table[code.value];
        if (classes & kSpace) {
            at += code.size;
            continue;
        }
        Word word{static_cast<std::uint32_t>(at), 0, 0, true, false};
        if (!(classes & kWord)) {
            const std::uint32_t first = code.value;
            do {
                at += code.size, ++word.characters;
                if (at == text.size()) break;
                code = code_at(text, at);
            } while (code.value == first);
            word.symbol = classes & kSymbol;
        } else {
            unsigned every = kSymbol, any = 0, before = 0;
            while (true) {
                const std::size_t begin = at;  // of a run in ASCII, of which most words consist
                for (; at < text.size() && static_cast<unsigned char>(text[at]) < 0x80; ++at) {
                    classes = table[static_cast<unsigned char>(text[at])];
                    if (!(classes & kWord)) break;
                    every &= classes, any |= classes, before = classes;
                }
                word.characters += static_cast<std::uint32_t>(at - begin);
                if (at == text.size()) break;
                code = code_at(text, at);
                classes = table[code.value];
                if (classes & kWord) {
                    every &= classes, any |= classes, before = classes;
                } else {
                    const bool apostrophe = code.value == '\'' || code.value == 0x2019;
                    const unsigned both = apostrophe                               ? static_cast<unsigned>(kAlpha)
                                          : code.value == '.' || code.value == ',' ? static_cast<unsigned>(kDigit)
                                                                                   : 0U;
                    const std::size_t next = at + code.size;
                    if (!(before & both) || next == text.size() || !(table[code_at(text, next).value] & both)) break;
                }
                at += code.size, ++word.characters;
            }
            word.symbol = every, word.alpha = any & kAlpha;
        }
        word.end = static_cast<std::uint32_t>(at);
        words.push_back(word);
    }
}

// A word that somebody else split.
inline Word given_word(std::string_view text, std::uint32_t begin, std::uint32_t end) {
    Word word{begin, end, 0, true, false};
    for (std::size_t at = begin; at < end;) {
        const Code code = code_at(text, at);
        const unsigned classes = classes_of(code.value);
        word.symbol = word.symbol && (classes & kSymbol);
        word.alpha = word.alpha || (classes & kAlpha);
        ++word.characters, at += code.size;
    }
    return word;
}

inline double ratio(std::size_t part, std::size_t whole) {
    return whole ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

inline std::size_t count_of(std::string_view text, std::string_view part) {
    std::size_t count = 0;
    for (std::size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) ++count;
    return count;
}

inline constexpr std::string_view kEllipsis = "...", kEllipsisCharacter = "\xE2\x80\xA6", kBullet = "\xE2\x80\xA2";

// Words that are not symbols, and their mean length in characters; hashes and ellipses for each word; shares of lines
// that begin with a bullet and that end with an ellipsis; share of words with a letter; different stop words.
inline constexpr std::size_t kGopher = 8;

inline void gopher(std::string_view text, std::span<const Word> words, std::span<const std::string> stop_words,
                   double* measures) {
    std::size_t real = 0, characters = 0, alpha = 0;
    std::vector<std::string_view> unseen(stop_words.begin(), stop_words.end());
    for (const Word& word : words) {
        alpha += word.alpha;
        if (word.symbol) continue;
        ++real, characters += word.characters;
        const std::string_view content = text.substr(word.begin, word.end - word.begin);
        std::erase(unseen, content);
    }
    std::size_t lines = 0, bullets = 0, ellipsis_lines = 0;
    for_each_line(text, [&](std::string_view line) {
        ++lines;
        const std::string_view left = left_stripped(line), right = right_stripped(line);
        bullets += left.starts_with(kBullet) || left.starts_with('-');
        ellipsis_lines += right.ends_with(kEllipsis) || right.ends_with(kEllipsisCharacter);
    });
    const std::size_t hashes = static_cast<std::size_t>(std::count(text.begin(), text.end(), '#'));
    const std::size_t ellipses = count_of(text, kEllipsis) + count_of(text, kEllipsisCharacter);
    measures[0] = static_cast<double>(real);
    measures[1] = ratio(characters, real);
    measures[2] = ratio(hashes, words.size());
    measures[3] = ratio(ellipses, words.size());
    measures[4] = ratio(bullets, lines);
    measures[5] = ratio(ellipsis_lines, lines);
    measures[6] = ratio(alpha, words.size());
    measures[7] = static_cast<double>(stop_words.size() - unseen.size());
}

// Numbers of things by their hash. Starting anew costs nothing: what an earlier use left has lower numbers.
class Seen {
public:
    // For at most `things`, whose numbers are less than `most`.
    void begin(std::size_t things, std::size_t most) {
        std::size_t size = 16;
        while (size < 2 * things) size *= 2;
        mask_ = size - 1;
        base_ += used_;
        used_ = most;
        if (slots_.size() < size || base_ + most >= 0xFFFFFFFF) {
            slots_.assign(std::max(size, slots_.size()), {0, 0});
            base_ = 0;
        }
    }

    // The number of an equal thing that is there, or `number`, which is there now; `equal` compares with a number.
    template <typename Equal>
    std::size_t add(std::size_t number, std::uint64_t hash, Equal&& equal) {
        const auto upper = static_cast<std::uint32_t>(hash >> 32);
        for (std::size_t at = hash & mask_;; at = (at + 1) & mask_) {
            Slot& slot = slots_[at];
            if (slot.number <= base_) {
                slot = {upper, static_cast<std::uint32_t>(base_ + number + 1)};
                return number;
            }
            const std::size_t other = slot.number - base_ - 1;
            if (slot.hash == upper && equal(other)) return other;
        }
    }

private:
    struct Slot {
        std::uint32_t hash;    // its upper half
        std::uint32_t number;  // and one more, and base_; at most base_: nothing
    };

    std::vector<Slot> slots_;
    std::size_t mask_ = 0, base_ = 0, used_ = 0;
};

// Hashes of substrings between word borders in constant time each: a polynomial of bytes modulo 2^64 (Karp and Rabin
// 1987). Substrings of equal hashes are compared byte by byte, so the hash only decides the speed.
class Prefixes {
public:
    Prefixes() : powers_(kPowers) {
        powers_[0] = 1;
        for (std::size_t count = 1; count < kPowers; ++count) powers_[count] = powers_[count - 1] * kBase;
    }

    void clear() {
        sums_.assign(1, 0);
        bytes_.assign(1, 0);
    }

    void add(std::string_view word) {
        std::uint64_t sum = sums_.back();
        for (const char c : word) sum = sum * kBase + static_cast<unsigned char>(c) + 1;
        sums_.push_back(sum);
        bytes_.push_back(bytes_.back() + static_cast<std::uint32_t>(word.size()));
    }

    std::size_t words() const { return sums_.size() - 1; }

    // Where word `number` begins among the bytes of all.
    std::size_t begin(std::size_t number) const { return bytes_[number]; }

    // Of the words [first, last).
    std::uint64_t hash(std::size_t first, std::size_t last) const {
        std::uint64_t value = sums_[last] - sums_[first] * power(bytes_[last] - bytes_[first]);
        value ^= value >> 32;
        value *= 0xD6E8FEB86659FD93;
        return value ^ value >> 32;
    }

private:
    static constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15;
    static constexpr std::size_t kPowers = 1024;

    std::uint64_t power(std::size_t count) const {
        if (count < kPowers) return powers_[count];
        std::uint64_t result = powers_[count % kPowers], square = powers_[kPowers - 1] * kBase;
        for (count /= kPowers; count; count /= 2, square *= square)
            if (count % 2) result *= square;
        return result;
    }

    std::vector<std::uint64_t> sums_, powers_;
    std::vector<std::uint32_t> bytes_;
};

struct Repeated {
    std::size_t parts = 0, repeats = 0, characters = 0;
};

// Repetition in a text; keeps its memory from text to text.
class Repetition {
public:
    static constexpr std::size_t kFirstTop = 2, kLastTop = 4, kFirstAll = 5, kLastAll = 10;
    // Shares of repeated paragraphs, of their characters, of lines, of their characters; of the characters of the most
    // frequent 2-, 3- and 4-gram; of those of repeated 5- to 10-grams.
    static constexpr std::size_t kMeasures = 4 + (kLastTop - kFirstTop + 1) + (kLastAll - kFirstAll + 1);

    void measure(std::string_view text, std::span<const Word> words, double* measures) {
        const std::size_t characters = characters_of(text);
        const Repeated paragraphs = repeated(stripped(text), 2), lines = repeated(text, 1);
        *measures++ = ratio(paragraphs.repeats, paragraphs.parts);
        *measures++ = ratio(paragraphs.characters, characters);
        *measures++ = ratio(lines.repeats, lines.parts);
        *measures++ = ratio(lines.characters, characters);
        join(text, words);
        for (std::size_t n = kFirstTop; n <= kLastTop; ++n) *measures++ = ratio(top(n), characters);
        find_places();
        for (std::size_t n = kFirstAll; n <= kLastAll; ++n) *measures++ = ratio(all(n), characters);
    }

    // The repeated lines of FineWeb, blank ones left out.
    Repeated repeated_lines(std::string_view text) { return repeated(text, 0); }

private:
    // least: newlines between parts; 0: one, and blank parts do not count.
    Repeated repeated(std::string_view text, std::size_t least) {
        Repeated result;
        const std::size_t most = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
        seen_.begin(most, most);
        parts_.clear();
        const auto take = [&](std::string_view part) {
            if (!least && stripped(part).empty()) return;
            parts_.push_back(part);
            const std::size_t number = parts_.size() - 1;
            const std::size_t first =
                seen_.add(number, minhash::xxh64(part), [&](std::size_t other) { return parts_[other] == part; });
            if (first != number) ++result.repeats, result.characters += characters_of(part);
        };
        for_each_between(text, std::max<std::size_t>(least, 1), take);
        result.parts = parts_.size();
        return result;
    }

    // Words one after the other, so that an n-gram is a substring, and what the last window needs.
    void join(std::string_view text, std::span<const Word> words) {
        joined_.clear(), counts_.assign(1, 0), prefixes_.clear();
        for (const Word& word : words) {
            const std::string_view content = text.substr(word.begin, word.end - word.begin);
            joined_ += content;
            counts_.push_back(counts_.back() + word.characters);
            prefixes_.add(content);
        }
        joined_.append(kWindow, '\0');
    }

    std::string_view gram(std::size_t first, std::size_t n) const {
        const std::size_t begin = prefixes_.begin(first);
        return std::string_view(joined_).substr(begin, prefixes_.begin(first + n) - begin);
    }

    // Whether the n-grams that begin at two words consist of the same words.
    bool same_words(std::size_t one, std::size_t other, std::size_t n) const {
        const std::size_t begin = prefixes_.begin(one), other_begin = prefixes_.begin(other);
        for (std::size_t word = 1; word < n; ++word)
            if (prefixes_.begin(one + word) - begin != prefixes_.begin(other + word) - other_begin) return false;
        return gram(one, n) == gram(other, n);
    }

    // Characters of the most frequent n-gram, joined by blanks, times how often it occurs; the first of those. n grows
    // by one from call to call, because an n-gram recurs only if its first and its last n - 1 words do.
    std::size_t top(std::size_t n) {
        const std::size_t words = prefixes_.words();
        if (words < n) return 0;
        if (n == kFirstTop) recurs_.assign(words, 1);
        seen_.begin(words, words);
        times_.assign(words, 1), firsts_.resize(words);
        std::size_t most = 1, best = 0;
        for (std::size_t first = 0; first + n <= words; ++first) {
            std::size_t number = first;
            if (recurs_[first] && recurs_[first + 1])
                number = seen_.add(first, prefixes_.hash(first, first + n),
                                   [&](std::size_t other) { return same_words(first, other, n); });
            firsts_[first] = static_cast<std::uint32_t>(number);
            if (number == first) continue;
            const std::size_t times = ++times_[number];
            if (times > most || (times == most && number < best)) most = times, best = number;
        }
        for (std::size_t first = 0; first + n <= words; ++first) recurs_[first] = times_[firsts_[first]] > 1;
        return (counts_[best + n] - counts_[best] + n - 1) * most;
    }

    // Leaves in places_ the words at which an n-gram of all(n) may equal another. One of kWindow bytes or more does only
    // if its first kWindow bytes do, and of their hashes most occur once: two bits for each hash, once and again, and no
    // branch that depends on the text.
    void find_places() {
        const std::size_t words = prefixes_.words();
        const int shift = 64 - std::max(8, static_cast<int>(std::bit_width(8 * words)));
        marks_.assign(std::size_t{1} << (64 - shift - 5), 0);
        windows_.resize(words), recurs_.resize(words), places_.resize(words);
        for (std::size_t first = 0; first < words; ++first) {
            const char* const at = &joined_[prefixes_.begin(first)];
            const std::uint64_t hash = minhash::word_at(at) * 0x9E3779B97F4A7C15 ^ minhash::word_at(at + kWindow - 8);
            const auto upper = static_cast<std::uint32_t>((hash ^ hash >> 32) * 0xD6E8FEB86659FD93 >> shift);
            windows_[first] = upper;
            const std::uint64_t once = std::uint64_t{1} << 2 * (upper % 32);
            marks_[upper / 32] |= (marks_[upper / 32] & once) << 1 | once;
        }
        for (std::size_t first = 0; first < words; ++first) {
            recurs_[first] = marks_[windows_[first] / 32] >> (2 * (windows_[first] % 32) + 1) & 1;
            places_[first] = static_cast<std::uint32_t>(first);
        }
    }

    // Characters of n-grams that occurred before, joined by nothing, as datatrove has it; one that did is passed over.
    // n grows by one from call to call.
    std::size_t all(std::size_t n) {
        const std::size_t words = prefixes_.words();
        if (words < n) return 0;
        std::size_t count = 0;
        for (const std::uint32_t first : places_) {
            if (first + n > words) break;
            places_[count] = first;
            count += recurs_[first] || prefixes_.begin(first + n) - prefixes_.begin(first) < kWindow;
        }
        places_.resize(count);
        seen_.begin(count, words);
        std::size_t characters = 0, next = 0;
        for (const std::uint32_t first : places_) {
            if (first < next) continue;
            const std::string_view content = gram(first, n);
            const std::size_t number = seen_.add(first, prefixes_.hash(first, first + n),
                                                 [&](std::size_t other) { return content == gram(other, n); });
            if (number != first) characters += counts_[first + n] - counts_[first], next = first + n;
        }
        return characters;
    }

    static constexpr std::size_t kWindow = 16;

    Seen seen_;
    Prefixes prefixes_;
    std::vector<std::string_view> parts_;
    std::string joined_;
    std::vector<std::uint32_t> counts_, times_, firsts_, windows_, places_;
    std::vector<std::uint8_t> recurs_;
    std::vector<std::uint64_t> marks_;
};

// Lines that are not blank; shares of these that end in a stop mark and that have at most `short_line` characters;
// share of characters in repeated lines; newlines for each word.
inline constexpr std::size_t kFineWeb = 5;

inline void fineweb(std::string_view text, std::size_t words, std::size_t short_line, Repetition& repetition,
                    double* measures) {
    std::size_t lines = 0, stopped = 0, shorter = 0;
    for_each_between(text, 1, [&](std::string_view line) {
        if (stripped(line).empty()) return;
        ++lines;
        stopped += (classes_of(code_at(line, last_code_begin(line)).value) & kStop) != 0;
        shorter += line.size() <= short_line || (line.size() <= 4 * short_line && characters_of(line) <= short_line);
    });
    const std::size_t newlines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
    measures[0] = static_cast<double>(lines);
    measures[1] = ratio(stopped, lines);
    measures[2] = ratio(shorter, lines);
    measures[3] = ratio(repetition.repeated_lines(text).characters, characters_of(text) - newlines);
    measures[4] = ratio(newlines, words);
}

// Which lines and texts C4 keeps.
struct C4 {
    bool citations = true;  // are cut
    bool stop_mark = true;  // a line ends in one
    std::int64_t min_sentences = 5, min_line_words = 3, max_word_characters = 1000;  // -1: any
    bool lorem_ipsum = true, javascript = true, curly_bracket = true, policy = true;
};

enum class C4Verdict : std::uint8_t { kept, lorem_ipsum, curly_bracket, too_few_sentences };

// ASCII lower case, and the Kelvin sign, the only other character whose lower case is ASCII.
inline void append_lower(std::string_view line, std::string& lower) {
    constexpr std::string_view kelvin = "\xE2\x84\xAA";
    lower.clear();
    for (std::size_t sign = 0; (sign = line.find(kelvin)) != std::string_view::npos; line.remove_prefix(sign + kelvin.size()))
        lower.append(line.substr(0, sign)) += 'k';
    lower += line;
    for (char& c : lower) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
}

inline std::string without_citations(std::string_view line) {
    std::string rest;
    for (std::size_t at = 0; at < line.size();) {
        if (line[at] == '[') {
            std::size_t end = at + 1;
            while (end < line.size()) {
                const Code code = code_at(line, end);
                if (!(classes_of(code.value) & kDigit)) break;
                end += code.size;
            }
            if (end < line.size() && line[end] == ']') {
                at = end + 1;
                continue;
            }
            bool cut = false;
            for (const std::string_view note : {std::string_view("[edit]"), std::string_view("[citation needed]")}) {
                if (line.substr(at).starts_with(note)) at += note.size(), cut = true;
                if (cut) break;
            }
            if (cut) continue;
        }
        rest += line[at++];
    }
    return rest;
}

// A sentence ends with a word that is one stop mark; the next begins with a word that is none and no symbol.
inline std::size_t sentences_of(std::string_view line, std::vector<Word>& words) {
    split_words(line, words);
    std::size_t sentences = words.empty() ? 0 : 1;
    bool ended = false;
    for (const Word& word : words) {
        const bool stop = word.characters == 1 && (classes_of(code_at(line, word.begin).value) & kStop);
        if (ended && !stop && !word.symbol) ++sentences, ended = false;
        ended = ended || stop;
    }
    return sentences;
}

inline C4Verdict c4(std::string_view text, const C4& rules, std::string& kept) {
    kept.clear();
    bool first = true;
    std::int64_t sentences = 0;
    std::vector<Word> words;
    std::string rest, lower;
    C4Verdict verdict = C4Verdict::kept;
    for_each_line(text, [&](std::string_view whole) {
        if (verdict != C4Verdict::kept) return;
        std::string_view line = stripped(whole);
        std::int64_t line_words = 0, length = 0, longest = 0;
        for (std::size_t at = 0; at < line.size();) {
            const Code code = code_at(line, at);
            if (classes_of(code.value) & kSpace) length = 0;
            else if (++length == 1) ++line_words;
            longest = std::max(longest, length);
            at += code.size;
        }
        if (rules.max_word_characters >= 0 && longest > rules.max_word_characters) return;
        if (rules.citations && line.find('[') != std::string_view::npos) {
            rest = without_citations(line);
            line = rest;
        }
        const bool stops = !line.empty() && std::string_view(".?!\"'").find(line.back()) != std::string_view::npos;
        if (rules.stop_mark && (!stops || line.ends_with(kEllipsis))) return;
        if (line_words < rules.min_line_words) return;
        append_lower(line, lower);
        const auto has = [&](std::string_view part) {
            return memmem(lower.data(), lower.size(), part.data(), part.size()) != nullptr;
        };
        if (rules.lorem_ipsum && has("lorem ipsum")) {
            verdict = C4Verdict::lorem_ipsum;
            return;
        }
        if (rules.javascript && has("javascript")) return;
        if (rules.curly_bracket && line.find('{') != std::string_view::npos) {
            verdict = C4Verdict::curly_bracket;
            return;
        }
        if (rules.policy && (has("terms of use") || has("privacy policy"))) return;
        if (rules.policy && has("cookie") &&
            (has("cookie policy") || has("uses cookies") || has("use of cookies") || has("use cookies")))
            return;
        if (rules.min_sentences >= 0) sentences += static_cast<std::int64_t>(sentences_of(line, words));
        if (!first) kept += '\n';
        first = false;
        kept += line;
    });
    if (verdict == C4Verdict::kept && sentences < rules.min_sentences) verdict = C4Verdict::too_few_sentences;
    kept = std::string(stripped(kept));
    return verdict;
}

// The third longest line in characters, as mC4's rule on paragraphs asks; 0: fewer than three lines.
inline std::size_t third_longest_line(std::string_view text) {
    std::array<std::size_t, 3> longest{};
    std::size_t lines = 0;
    for (std::size_t begin = 0;; ++lines) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        const std::size_t size = characters_of(text.substr(begin, end - begin));
        if (size > longest[2]) {
            longest[2] = size;
            std::sort(longest.begin(), longest.end(), std::greater<>());
        }
        if (end == text.size()) break;
        begin = end + 1;
    }
    return lines + 1 < 3 ? 0 : longest[2];
}

// Runs of blanks, and newlines after a letter or digit with one blank behind them, become a blank: what
// tools/openwebtext calls general cleaning.
inline std::string collapsed(std::string_view text) {
    std::string result;
    bool after_word = false;
    for (std::size_t at = 0; at < text.size();) {
        std::size_t end = at;
        if (text[at] == ' ') {
            while (end < text.size() && text[end] == ' ') ++end;
            if (end - at < 2) end = at;
        } else if (text[at] == '\n' && after_word) {
            while (end < text.size() && text[end] == '\n') ++end;
            if (end < text.size() && text[end] == ' ') ++end;
        }
        if (end > at) {
            result += ' ';
            at = end, after_word = false;
            continue;
        }
        const Code code = code_at(text, at);
        after_word = classes_of(code.value) & kAlnum;
        result.append(text.substr(at, code.size));
        at += code.size;
    }
    return result;
}

// Runs of lines that ftfy may change, as numbers of characters [begin, end) and whether an earlier line has "<". A line
// of printable ASCII without "&", and tabs, is a fixed point of its defaults.
struct Doubtful {
    std::size_t begin, end;
    bool after_tag;
};

inline constexpr std::array<bool, 256> make_clean() {
    std::array<bool, 256> clean{};
    clean['\t'] = true;
    for (std::size_t c = 0x20; c < 0x7F; ++c) clean[c] = c != '&';
    return clean;
}

inline constexpr std::array<bool, 256> kClean = make_clean();

inline void doubtful_lines(std::string_view text, std::vector<Doubtful>& runs) {
    runs.clear();
    std::size_t character = 0;
    bool tag = false;
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
        const std::string_view line = text.substr(begin, end - begin);
        const std::size_t content = line.size() - (line.back() == '\n');
        bool clean = true;
        for (std::size_t at = 0; at < content; ++at) clean &= kClean[static_cast<unsigned char>(line[at])];
        const std::size_t size = clean ? line.size() : characters_of(line);
        if (!clean) {
            if (!runs.empty() && runs.back().end == character) runs.back().end += size;
            else runs.push_back({character, character + size, tag});
        }
        tag = tag || line.find('<') != std::string_view::npos;
        character += size, begin = end;
    }
}

}  // namespace mdata::text
