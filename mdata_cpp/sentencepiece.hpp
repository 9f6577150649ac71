// Texts to ids with a SentencePiece model of the BPE kind: prepare, cut where no piece can lie across, encode words.
//
// Two characters that no piece has side by side can never be in one symbol, and what is joined on one side of them
// does not change what is joined on the other. So a text is cut there, and every part is encoded once and remembered.
// Pieces that are defined for users are matched first, the longest at each place, and part the text too. What is no
// piece becomes its bytes, or, with its unknown neighbours, one unknown id. Not for models with unused pieces, nor
// for those that leave blanks as they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sentencepiece_merges.hpp"
#include "sentencepiece_text.hpp"
#include "sentencepiece_words.hpp"

namespace mdata::sp {

struct Facts {
    TextRules rules;
    std::vector<Piece> pieces;       // the ordinary ones, blanks written as ' '
    std::vector<Piece> user_pieces;  // the same of those that are defined for users
    std::int32_t unknown_id = 0;
    std::vector<std::int32_t> byte_ids;  // 256, or none
};

// Ids of many texts, one after another. Room is made for a whole text at once; what is not written yet is left as it is.
class Ids {
   public:
    std::size_t size() const { return size_; }
    const std::int32_t* data() const { return data_.get(); }

    // Forget all ids; memory is kept, if it is not much.
    void clear() {
        size_ = 0;
        if (capacity_ > kMostKept) data_.reset();
        if (data_ == nullptr) capacity_ = 0;
    }

    // Where the next id goes, with room for so many.
    std::int32_t* room(std::size_t count) {
        if (size_ + count > capacity_) {
            capacity_ = std::max(size_ + count, 2 * capacity_);
            auto larger = std::make_unique_for_overwrite<std::int32_t[]>(capacity_);
            if (size_ != 0) std::memcpy(larger.get(), data_.get(), 4 * size_);
            data_ = std::move(larger);
        }
        return data_.get() + size_;
    }

    // What was written to `room` ends here.
    void end_at(const std::int32_t* end) { size_ = static_cast<std::size_t>(end - data_.get()); }

   private:
    static constexpr std::size_t kMostKept = std::size_t{16} << 20;
    std::unique_ptr<std::int32_t[]> data_;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

class BpeEncoder {
   public:
    explicit BpeEncoder(const Facts& facts)
        : preparer_(facts.rules),
          merges_(facts.pieces),
          user_(entries(facts.user_pieces)),
          unknown_id_(facts.unknown_id),
          byte_ids_(facts.byte_ids) {}

    // Append the ids of a text.
    void encode(std::string_view text, Ids& out) {
        preparer_.prepare(text, prepared_);
        const std::size_t size = prepared_.size();
        prepared_.append(Words::kPadding, '\0');
        const std::string_view all(prepared_.data(), size);
        begin_ = out.room(kMostIdsOfByte * size + Words::kSpare);
        std::int32_t* end = begin_;
        for (std::size_t at = 0; at < size;) {
            std::int32_t id = 0;
            if (const std::size_t length = user_piece(all, at, id); length != 0) {
                *end++ = id;
                at += length;
                continue;
            }
            const std::size_t stop = end_of_word(all, at);
            end = encode_word(all.substr(at, stop - at), end);
            at = stop;
        }
        out.end_at(end);
    }

   private:
    // A blank that is no piece becomes three bytes; another byte gives one id at most.
    static constexpr std::size_t kMostIdsOfByte = 3;

    static std::vector<Trie::Entry> entries(const std::vector<Piece>& pieces) {
        std::vector<Trie::Entry> entries;
        for (const Piece& piece : pieces) entries.push_back({piece.text, piece.id});
        return entries;
    }

    std::size_t user_piece(std::string_view all, std::size_t at, std::int32_t& id) const {
        return user_.begins(all[at]) ? user_.longest(all.substr(at), id) : 0;
    }

    std::size_t end_of_word(std::string_view all, std::size_t at) const {
        std::size_t size = 0;
        std::uint32_t left = first_char(all.substr(at), size);
        for (at += size; at < all.size(); at += size) {
            const std::uint32_t right = first_char(all.substr(at), size);
            if (!merges_.may_join(left, right)) break;
            std::int32_t id = 0;
            if (user_piece(all, at, id) != 0) break;
            left = right;
        }
        return at;
    }

    // Write the ids of a word; where they end.
    std::int32_t* encode_word(std::string_view word, std::int32_t* out) {
        std::int32_t* end = out;
        if (word.size() > Words::kLongest) {
            end = encode_new(word, out);
        } else {
            const Words::Key key = Words::key_of(word);
            const std::size_t count = words_.find(key, word, out);
            end = out + count;
            if (count == 0) {
                end = encode_new(word, out);
                words_.insert(key, word, {out, end});
            }
        }
        // Unknown ids on both sides of a joint become one.
        if (byte_ids_.empty() && out != begin_ && out[-1] == unknown_id_ && out[0] == unknown_id_) {
            std::copy(out + 1, end, out);
            --end;
        }
        return end;
    }

    std::int32_t* encode_new(std::string_view word, std::int32_t* const begin) {
        std::int32_t* end = begin;
        merges_.encode(word, [&](std::int32_t id, std::size_t start, std::size_t stop) {
            if (id != Merges::kNoPiece) {
                *end++ = id;
            } else if (byte_ids_.empty()) {
                if (end == begin || end[-1] != unknown_id_) *end++ = unknown_id_;
            } else {
                for (const char byte : word.substr(start, stop - start)) end = write_bytes(byte, end);
            }
        });
        return end;
    }

    std::int32_t* write_bytes(char byte, std::int32_t* end) const {
        const std::string_view bytes = byte == ' ' ? kBlank : std::string_view(&byte, 1);
        for (const char one : bytes) *end++ = byte_ids_[static_cast<unsigned char>(one)];
        return end;
    }

    Preparer preparer_;
    Merges merges_;
    Trie user_;
    Words words_;
    std::int32_t unknown_id_;
    std::vector<std::int32_t> byte_ids_;
    std::string prepared_;
    std::int32_t* begin_ = nullptr;  // of the ids of the text at hand
};

}  // namespace mdata::sp
