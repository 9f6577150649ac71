// Exact matches of word n-grams of test items in texts, and the words of Megatron-LM's filter_ngrams.py.
//
// Words are runs of letters, marks, digits and connectors in lower case; an apostrophe between letters is dropped. An
// item of at least `most` words gives all its n-grams of that many words, one of at least `least` words is one n-gram.
// Hashes of n-grams are found in constant time from prefix sums (Karp and Rabin 1987), looked up behind a bitmap, and
// each hit is compared word by word, so nothing is found that is not there.
// Slow twin: tests/reference/decontaminate.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "minhash.hpp"
#include "punkt.hpp"
#include "text_rules.hpp"
#include "utf8.hpp"

namespace mdata::text {

inline constexpr std::uint32_t kCapitalSigma = 0x3A3, kSigma = 0x3C3, kFinalSigma = 0x3C2, kDottedI = 0x130;

// The lower case of a code point by itself; that of the dotted I is two code points.
inline void append_lower(std::uint32_t code, std::string& bytes) {
    static const std::vector<std::uint32_t> table = [] {
        std::vector<std::uint32_t> lower(0x110000);
        for (std::uint32_t each = 0; each < lower.size(); ++each)
            lower[each] = static_cast<std::uint32_t>(static_cast<std::int64_t>(each) + punkt::kind_of(each).to_lower);
        return lower;
    }();
    append_code(table[code], bytes);
    if (code == kDottedI) bytes += "\xCC\x87";
}

// str.lower of Python 3.11. A capital sigma at the end of a word has a form of its own.
inline void lower_text(std::string_view text, std::string& lower) {
    lower.clear();
    const auto is_final = [&](std::size_t at) {
        const auto flags_of = [&](std::size_t place) { return punkt::kind_of(code_at(text, place).value).flags; };
        std::size_t before = at;
        bool cased = false;
        while (before) {
            before = last_code_begin(text.substr(0, before));
            if (flags_of(before) & punkt::kIgnorable) continue;
            cased = flags_of(before) & punkt::kCased;
            break;
        }
        if (!cased) return false;
        for (std::size_t after = at + 2; after < text.size(); after += code_at(text, after).size) {
            if (flags_of(after) & punkt::kIgnorable) continue;
            return !(flags_of(after) & punkt::kCased);
        }
        return true;
    };
    for (std::size_t at = 0; at < text.size();) {
        const Code code = code_at(text, at);
        if (code.value < 0x80) lower += static_cast<char>(code.value - 'A' < 26 ? code.value + 32 : code.value);
        else if (code.value == kCapitalSigma) append_code(is_final(at) ? kFinalSigma : kSigma, lower);
        else append_lower(code.value, lower);
        at += code.size;
    }
}

// The matches of \w+ in a text in lower case: words, joined by newlines, and where each begins in characters.
inline void openwebtext_words(std::string_view text, std::string& words, std::vector<std::int64_t>& begins) {
    std::string lower;
    lower_text(text, lower);
    bool inside = false;
    std::int64_t character = 0;
    for (std::size_t at = 0; at < lower.size(); ++character) {
        const Code code = code_at(lower, at);
        if (classes_of(code.value) & kAlnum) {
            if (!inside) {
                if (!begins.empty()) words += '\n';
                begins.push_back(character);
            }
            words.append(lower, at, code.size);
        }
        inside = classes_of(code.value) & kAlnum;
        at += code.size;
    }
}

class NgramIndex {
public:
    // Contaminated passages of a text, in characters, and the items whose n-grams are there.
    struct Matches {
        std::vector<std::pair<std::size_t, std::size_t>> spans;
        std::vector<std::uint32_t> items;
    };

    NgramIndex(std::span<const std::string_view> items, std::size_t most, std::size_t least)
        : powers_(most + 1, 1) {
        if (!least || least > most || most > 256) throw std::invalid_argument("1 <= least <= most <= 256 words");
        for (std::size_t n = 1; n <= most; ++n) powers_[n] = powers_[n - 1] * kBase;
        Words words;
        for (std::size_t item = 0; item < items.size(); ++item) {
            read(items[item], words);
            const std::size_t count = words.size();
            if (count < least) continue;
            const auto begin = static_cast<std::uint32_t>(ends_.size() - 1);
            for (std::size_t word = 0; word < count; ++word) {
                bytes_ += words.content(word);
                ends_.push_back(bytes_.size());
            }
            const std::size_t n = std::min(count, most);
            for (std::size_t first = 0; first + n <= count; ++first)
                grams_.push_back({words.hash(first, n, powers_), begin + static_cast<std::uint32_t>(first),
                                  static_cast<std::uint32_t>(item), kNone, static_cast<std::uint16_t>(n)});
            const auto same = [&](const Length& length) { return length.words == n; };
            if (std::none_of(lengths_.begin(), lengths_.end(), same)) lengths_.push_back({n, 0, {}});
            std::find_if(lengths_.begin(), lengths_.end(), same)->grams += count - n + 1;
        }
        if (bytes_.size() >= kNone || ends_.size() >= kNone || grams_.size() >= kNone)
            throw std::overflow_error("test items of more than 4 GiB");
        std::size_t size = 64;
        while (size < 2 * grams_.size()) size *= 2;
        slots_.assign(size, kNone);
        for (Length& length : lengths_) {
            std::size_t words64 = 1;
            while (64 * words64 < 16 * length.grams) words64 *= 2;
            length.filter.assign(words64, 0);
        }
        for (std::uint32_t gram = 0; gram < grams_.size(); ++gram) insert(gram);
    }

    std::size_t ngrams() const { return distinct_; }

    // `words` and `seen` keep their memory from text to text.
    struct Words {
        std::string bytes;
        std::vector<std::uint32_t> ends{0};
        std::vector<std::pair<std::uint32_t, std::uint32_t>> characters;
        std::vector<std::uint64_t> sums{0};

        std::size_t size() const { return characters.size(); }
        std::string_view content(std::size_t word) const {
            return std::string_view(bytes).substr(ends[word], ends[word + 1] - ends[word]);
        }
        std::uint64_t hash(std::size_t first, std::size_t n, const std::vector<std::uint64_t>& powers) const {
            return mixed(sums[first + n] - sums[first] * powers[n]);
        }
    };

    void match(std::string_view text, Words& words, std::vector<std::uint32_t>& stamps, std::uint32_t stamp,
               Matches& matches) const {
        matches.spans.clear(), matches.items.clear();
        if (grams_.empty()) return;
        read(text, words);
        stamps.resize(grams_.size());
        for (const Length& length : lengths_) {
            const std::size_t n = length.words;
            for (std::size_t first = 0; first + n <= words.size(); ++first) {
                const std::uint64_t hash = words.hash(first, n, powers_);
                if (!length.may_hold(hash)) continue;
                const std::uint32_t gram = find(words, first, n, hash);
                if (gram == kNone) continue;
                const std::size_t begin = words.characters[first].first, end = words.characters[first + n - 1].second;
                if (!matches.spans.empty() && matches.spans.back().first <= begin && begin <= matches.spans.back().second)
                    matches.spans.back().second = std::max(matches.spans.back().second, end);
                else matches.spans.emplace_back(begin, end);
                if (stamps[gram] == stamp) continue;
                stamps[gram] = stamp;
                for (std::uint32_t each = gram; each != kNone; each = grams_[each].next)
                    matches.items.push_back(grams_[each].item);
            }
        }
        merge(matches.spans);
        std::sort(matches.items.begin(), matches.items.end());
        matches.items.erase(std::unique(matches.items.begin(), matches.items.end()), matches.items.end());
    }

private:
    static constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15;
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;

    struct Gram {
        std::uint64_t hash;
        std::uint32_t first, item, next;
        std::uint16_t n;
    };

    // The n-grams of one length: a bitmap that says which hashes need not be looked up.
    struct Length {
        std::size_t words, grams;
        std::vector<std::uint64_t> filter;  // a power of two of words

        void hold(std::uint64_t hash) { filter[hash >> 30 & (filter.size() - 1)] |= std::uint64_t{1} << (hash >> 24 & 63); }
        bool may_hold(std::uint64_t hash) const {
            return filter[hash >> 30 & (filter.size() - 1)] >> (hash >> 24 & 63) & 1;
        }
    };

    static std::uint64_t mixed(std::uint64_t value) {
        value ^= value >> 32;
        value *= 0xD6E8FEB86659FD93;
        return value ^ value >> 32;
    }

    // Lower case of ASCII letters and digits; 0: other characters of ASCII, and those beyond it.
    static constexpr std::array<char, 256> kAsciiLower = [] {
        std::array<char, 256> lower{};
        for (unsigned c = 0; c < 0x80; ++c)
            if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '_') lower[c] = static_cast<char>(c);
            else if (c >= 'A' && c <= 'Z') lower[c] = static_cast<char>(c + 32);
        return lower;
    }();

    static std::uint64_t hash_of(std::string_view word) {
        if (word.size() > 8) return minhash::xxh64(word);
        std::uint64_t value = 0;
        std::memcpy(&value, word.data(), word.size());
        return mixed(value + word.size() * kBase);
    }

    // The words of a text and the prefix sums of their hashes.
    static void read(std::string_view text, Words& words) {
        if (text.size() >= kNone / 2) throw std::overflow_error("a text of 2 GiB or more");
        words.bytes.clear(), words.ends.assign(1, 0), words.characters.clear(), words.sums.assign(1, 0);
        const auto& table = class_table();
        std::size_t character = 0;
        for (std::size_t at = 0; at < text.size();) {
            Code code = code_at(text, at);
            if (!(table[code.value] & kWord)) {
                at += code.size, ++character;
                continue;
            }
            const std::size_t begin = character;
            while (true) {
                std::size_t end = at;
                while (end < text.size() && kAsciiLower[static_cast<unsigned char>(text[end])]) ++end;
                if (end > at) {
                    const std::size_t before = words.bytes.size();
                    words.bytes.append(text, at, end - at);
                    for (std::size_t place = before; place < words.bytes.size(); ++place)
                        words.bytes[place] = kAsciiLower[static_cast<unsigned char>(words.bytes[place])];
                    character += end - at, at = end;
                    if (at == text.size()) break;
                }
                code = code_at(text, at);
                if (!(table[code.value] & kWord)) {
                    const bool apostrophe = code.value == '\'' || code.value == 0x2019;
                    if (!apostrophe || !is_between_letters(text, at, code.size)) break;
                } else if (code.value == kCapitalSigma || code.value == kFinalSigma) {
                    append_code(kSigma, words.bytes);
                } else {
                    append_lower(code.value, words.bytes);
                }
                at += code.size, ++character;
                if (at == text.size()) break;
            }
            words.characters.emplace_back(static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(character));
            words.ends.push_back(static_cast<std::uint32_t>(words.bytes.size()));
            words.sums.push_back(words.sums.back() * kBase + hash_of(words.content(words.size() - 1)));
        }
    }

    static bool is_between_letters(std::string_view text, std::size_t at, std::size_t size) {
        if (at + size == text.size()) return false;
        const std::size_t before = last_code_begin(text.substr(0, at));
        return classes_of(code_at(text, before).value) & classes_of(code_at(text, at + size).value) & kAlpha;
    }

    std::string_view stored(std::size_t word) const {
        return std::string_view(bytes_).substr(ends_[word], ends_[word + 1] - ends_[word]);
    }

    // Chains an n-gram to an equal one, or gives it a slot.
    void insert(std::uint32_t number) {
        Gram& gram = grams_[number];
        for (std::size_t at = gram.hash & (slots_.size() - 1);; at = (at + 1) & (slots_.size() - 1)) {
            if (slots_[at] == kNone) {
                slots_[at] = number, ++distinct_;
                std::find_if(lengths_.begin(), lengths_.end(), [&](const Length& length) {
                    return length.words == gram.n;
                })->hold(gram.hash);
                return;
            }
            Gram& other = grams_[slots_[at]];
            if (other.hash == gram.hash && other.n == gram.n && equal(other, gram)) {
                if (other.item == gram.item || (other.next != kNone && grams_[other.next].item == gram.item)) return;
                gram.next = other.next, other.next = number;
                return;
            }
        }
    }

    bool equal(const Gram& one, const Gram& other) const {
        for (std::size_t word = 0; word < one.n; ++word)
            if (stored(one.first + word) != stored(other.first + word)) return false;
        return true;
    }

    std::uint32_t find(const Words& words, std::size_t first, std::size_t n, std::uint64_t hash) const {
        for (std::size_t at = hash & (slots_.size() - 1); slots_[at] != kNone; at = (at + 1) & (slots_.size() - 1)) {
            const Gram& gram = grams_[slots_[at]];
            if (gram.hash != hash || gram.n != n) continue;
            bool same = true;
            for (std::size_t word = 0; word < n && same; ++word)
                same = stored(gram.first + word) == words.content(first + word);
            if (same) return slots_[at];
        }
        return kNone;
    }

    // Sorted, and joined where they touch or overlap.
    static void merge(std::vector<std::pair<std::size_t, std::size_t>>& spans) {
        std::sort(spans.begin(), spans.end());
        std::size_t kept = 0;
        for (const auto& span : spans) {
            if (kept && span.first <= spans[kept - 1].second)
                spans[kept - 1].second = std::max(spans[kept - 1].second, span.second);
            else spans[kept++] = span;
        }
        spans.resize(kept);
    }

    std::size_t distinct_ = 0;
    std::vector<std::uint64_t> powers_;
    std::string bytes_;
    std::vector<std::size_t> ends_{0};
    std::vector<Gram> grams_;
    std::vector<Length> lengths_;
    std::vector<std::uint32_t> slots_;
};

}  // namespace mdata::text
