// Python bindings of gather.hpp, sequences.hpp and rows.hpp; documented in mdata/_core.pyi.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "block_shuffle.hpp"
#include "gather.hpp"
#include "native_rows.hpp"
#include "rows.hpp"
#include "sequences.hpp"

namespace {

namespace py = pybind11;
using mdata::Array;
using mdata::as_array;
using mdata::Int64s;
using mdata::SequenceIndex;
using mdata::TokenStore;
using mdata::TokenType;
using mdata::view;
using Bytes = Array<std::uint8_t>;

TokenType type_of(const std::string& name) {
    if (name == "uint8") return TokenType::uint8;
    if (name == "int8") return TokenType::int8;
    if (name == "uint16") return TokenType::uint16;
    if (name == "int16") return TokenType::int16;
    if (name == "int32") return TokenType::int32;
    if (name == "int64") return TokenType::int64;
    throw std::invalid_argument("token type " + name);
}

const std::byte* bytes_of(const Bytes& array) { return reinterpret_cast<const std::byte*>(array.data()); }

using Shard = std::tuple<std::optional<Bytes>, std::shared_ptr<mdata::PooledFile>, std::int64_t>;

// A store and the buffers it reads from.
struct KeptStore {
    std::vector<std::optional<Bytes>> kept;
    TokenStore store;
};

KeptStore make_store(const std::string& dtype, const std::vector<Shard>& shards) {
    const auto size = static_cast<std::int64_t>(mdata::size_of(type_of(dtype)));
    std::vector<std::optional<Bytes>> kept;
    std::vector<mdata::TokenFile> files;
    for (const auto& [bytes, file, tokens] : shards) {
        if (bytes && (tokens < 0 || tokens > bytes->size() / size)) throw std::invalid_argument("more tokens than bytes");
        if (!bytes && !file) throw std::invalid_argument("neither bytes nor a file");
        // Data of an empty array may be null, which would mean a file.
        files.push_back({bytes && tokens > 0 ? bytes_of(*bytes) : nullptr, bytes ? nullptr : file, tokens});
        kept.push_back(bytes);
    }
    return {std::move(kept), TokenStore(type_of(dtype), std::move(files))};
}

template <typename T>
std::span<const T> view_or_empty(const std::optional<Array<T>>& array) {
    return array ? view(*array) : std::span<const T>();
}

template <typename T>
std::span<T> rows_of(Array<T>& array) {
    if (array.ndim() != 2) throw std::invalid_argument("an array of two dimensions is expected");
    return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

using Fault = std::optional<std::tuple<std::size_t, std::int64_t, int>>;

Fault told(const std::optional<mdata::ReadFault>& fault) {
    if (!fault) return std::nullopt;
    return std::tuple(fault->shard, fault->byte, fault->error);
}

Fault gather(const KeptStore& self, const Int64s& first, const Int64s& count, const std::optional<Int64s>& ends,
             const std::optional<Int64s>& places, Int64s& out, std::int64_t fill, std::size_t threads) {
    const mdata::RowRuns runs{view(first), view(count), view_or_empty(ends), view_or_empty(places)};
    if (ends && ends->size() == 0 && first.size() > 0) throw std::invalid_argument("runs without rows");
    const mdata::RowBuffer rows{rows_of(out), static_cast<std::size_t>(out.shape(1)), fill};
    std::optional<mdata::ReadFault> fault;
    {
        const py::gil_scoped_release unlocked;
        fault = self.store.gather(runs, rows, threads);
    }
    return told(fault);
}

// An index and the tables it reads.
struct KeptIndex {
    std::vector<Bytes> kept;
    SequenceIndex index;
};

KeptIndex make_index(std::int64_t item_size, const std::vector<std::tuple<Bytes, Bytes, Bytes, std::int64_t>>& shards) {
    std::vector<Bytes> kept;
    std::vector<mdata::ShardTables> tables;
    for (const auto& [lengths, pointers, boundaries, tokens] : shards) {
        const std::int64_t sequences = lengths.size() / 4;
        const std::int64_t documents = boundaries.size() / 8 - 1;
        if (pointers.size() / 8 != sequences || documents < 0) throw std::invalid_argument("tables that do not fit each other");
        tables.push_back({bytes_of(lengths), bytes_of(pointers), bytes_of(boundaries), sequences, documents, tokens});
        kept.insert(kept.end(), {lengths, pointers, boundaries});
    }
    return {std::move(kept), SequenceIndex(item_size, std::move(tables))};
}

py::tuple cuts(const KeptIndex& self, const Int64s& starts, const Int64s& counts) {
    const auto from = view(starts);
    const auto many = view(counts);
    mdata::Cuts found;
    {
        const py::gil_scoped_release unlocked;
        found = self.index.cuts(from, many);
    }
    return py::make_tuple(as_array(std::move(found.ends)), as_array(std::move(found.places)));
}

template <typename Place>
py::tuple pieces(const KeptIndex& self, const Array<Place>& order, const Int64s& spans, std::int64_t extra) {
    const auto places = view(order);
    const auto rows = view(spans);
    mdata::Runs runs;
    {
        const py::gil_scoped_release unlocked;
        runs = self.index.pieces(places, rows, extra);
    }
    return py::make_tuple(as_array(std::move(runs.ends)), as_array(std::move(runs.first)), as_array(std::move(runs.count)));
}

py::tuple documents(const KeptIndex& self, const Int64s& numbers) {
    std::vector<std::int64_t> first(view(numbers).size());
    std::vector<std::int64_t> count(first.size());
    {
        const auto in = view(numbers);
        const py::gil_scoped_release unlocked;
        self.index.documents(in, first, count);
    }
    return py::make_tuple(as_array(std::move(first)), as_array(std::move(count)));
}

Array<std::uint8_t> odd_sequences(const KeptIndex& self, const Int64s& starts, const Int64s& counts) {
    std::vector<std::uint8_t> odd;
    {
        const auto from = view(starts);
        const auto many = view(counts);
        const py::gil_scoped_release unlocked;
        odd = self.index.odd_sequences(from, many);
    }
    return as_array(std::move(odd));
}

using mdata::BlockShuffle;

std::unique_ptr<BlockShuffle> make_blocks(const KeptIndex& index, std::int64_t first, std::int64_t last, std::int64_t block) {
    return std::make_unique<BlockShuffle>(index.index, first, last, block);
}

py::tuple block_pieces(const BlockShuffle& self, std::uint64_t low, std::uint64_t high, const Int64s& starts, const Int64s& counts,
                       std::int64_t inputs, std::size_t threads) {
    const auto from = view(starts);
    const auto many = view(counts);
    mdata::Runs runs;
    mdata::Cuts cuts;
    {
        const py::gil_scoped_release unlocked;
        runs = self.runs({low, high}, from, many, threads);
        cuts = mdata::cuts_of(runs, inputs);
    }
    return py::make_tuple(as_array(std::move(runs.ends)), as_array(std::move(runs.first)), as_array(std::move(runs.count)),
                          as_array(std::move(cuts.ends)), as_array(std::move(cuts.places)));
}

std::pair<std::int64_t, std::int64_t> block_place(const BlockShuffle& self, std::uint64_t low, std::uint64_t high, std::int64_t sequence) {
    return self.place({low, high}, sequence);
}

using Numbers = std::optional<std::int64_t>;
using Losses = std::optional<Array<float>>;
using Positions = std::optional<Int64s>;

mdata::RowArrays arrays_of(Int64s& text, Losses& loss, Positions& positions, std::size_t rows) {
    const auto cells = rows_of(text);
    const auto width = static_cast<std::size_t>(text.shape(1));
    if (width < 1 || static_cast<std::size_t>(text.shape(0)) != rows) throw std::invalid_argument("a row for each sample");
    const auto losses = loss ? rows_of(*loss) : std::span<float>();
    const auto numbers = positions ? rows_of(*positions) : std::span<std::int64_t>();
    if ((loss && losses.size() != rows * (width - 1)) || (positions && numbers.size() != rows * (width - 1))) {
        throw std::invalid_argument("one field for each input is expected");
    }
    return {cells, width, losses, numbers};
}

void finish_rows(Int64s& text, const Int64s& counts, const std::optional<std::tuple<Int64s, mdata::Int32s>>& cuts,
                 Losses& loss, Positions& positions, const mdata::RowRules& rules) {
    const auto many = view(counts);
    const auto arrays = arrays_of(text, loss, positions, many.size());
    const auto ends = cuts ? view(std::get<0>(*cuts)) : std::span<const std::int64_t>();
    const auto places = cuts ? view(std::get<1>(*cuts)) : std::span<const std::int32_t>();
    if (cuts && ends.size() != many.size()) throw std::invalid_argument("cuts for each row");
    const py::gil_scoped_release unlocked;
    mdata::finish_rows(rules, arrays, many, ends, places);
}

py::tuple told(mdata::CumulativeLengths&& found) {
    return py::make_tuple(as_array(std::move(found.starts)), found.longest);
}

// Null for None. As an argument of its class None costs as much as reading a row: pybind11 first looks, through an
// exception of Python, for another module that knows it, and then tries all arguments again.
template <typename T>
const T* or_none(const py::object& object) {
    if (object.is_none()) return nullptr;
    if (!py::isinstance<T>(object)) throw py::type_error("an object of another class is expected, or None");
    return object.cast<const T*>();
}

py::tuple read_native(const KeptStore& store, const py::object& index_or_none, const mdata::Permutation& permutation,
                      const Int64s& samples, const std::tuple<std::int64_t, std::int64_t, std::int64_t>& epoch,
                      std::tuple<Int64s, Losses, Positions> rows, const mdata::RowRules& rules, std::size_t threads,
                      const py::object& blocks_or_none, const std::pair<std::uint64_t, std::uint64_t>& blocks_key) {
    const auto* const index = or_none<KeptIndex>(index_or_none);
    const auto* const blocks = or_none<BlockShuffle>(blocks_or_none);
    auto& [text, loss, positions] = rows;
    const auto numbers = view(samples);
    const auto arrays = arrays_of(text, loss, positions, numbers.size());
    mdata::NativeRead found;
    {
        const py::gil_scoped_release unlocked;
        const mdata::EpochRows where{std::get<0>(epoch), std::get<1>(epoch), std::get<2>(epoch), blocks,
                                     {blocks_key.first, blocks_key.second}};
        found = mdata::read_native(store.store, index == nullptr ? nullptr : &index->index, permutation, numbers, where, rules,
                                   arrays, threads);
    }
    const Fault fault = told(found.fault);
    if (index == nullptr) return py::make_tuple(fault, py::none());
    return py::make_tuple(fault, told(std::move(found.documents)));
}

py::tuple cumulative_lengths(const Int64s& ends, const mdata::Int32s& places, std::int64_t inputs) {
    const auto rows = view(ends);
    const auto cuts = view(places);
    mdata::CumulativeLengths found;
    {
        const py::gil_scoped_release unlocked;
        found = mdata::cumulative_lengths(rows, cuts, inputs);
    }
    return told(std::move(found));
}

void bind_store(py::module_& module) {
    py::class_<KeptStore>(module, "TokenStore")
        .def(py::init(&make_store), py::arg("dtype"), py::arg("shards"))
        .def("gather", &gather, py::arg("first").noconvert(), py::arg("count").noconvert(), py::arg("ends").noconvert(),
             py::arg("places").noconvert(), py::arg("out").noconvert(), py::arg("fill"), py::arg("threads"));
}

void bind_sequences(py::module_& module) {
    py::class_<KeptIndex>(module, "SequenceIndex")
        .def(py::init(&make_index), py::arg("item_size"), py::arg("shards"))
        .def("cuts", &cuts, py::arg("starts").noconvert(), py::arg("counts").noconvert())
        .def("pieces", &pieces<std::int32_t>, py::arg("order").noconvert(), py::arg("spans").noconvert(), py::arg("extra"))
        .def("pieces", &pieces<std::int64_t>, py::arg("order").noconvert(), py::arg("spans").noconvert(), py::arg("extra"))
        .def("documents", &documents, py::arg("numbers").noconvert())
        .def("odd_sequences", &odd_sequences, py::arg("starts").noconvert(), py::arg("counts").noconvert());
    py::class_<BlockShuffle>(module, "BlockShuffle")
        .def(py::init(&make_blocks), py::arg("index"), py::arg("first"), py::arg("last"), py::arg("block"), py::keep_alive<1, 2>())
        .def("pieces", &block_pieces, py::arg("low"), py::arg("high"), py::arg("starts").noconvert(),
             py::arg("counts").noconvert(), py::arg("inputs"), py::arg("threads"))
        .def("place", &block_place, py::arg("low"), py::arg("high"), py::arg("sequence"));
    py::register_exception_translator([](std::exception_ptr raised) {
        try {
            if (raised) std::rethrow_exception(raised);
        } catch (const mdata::IndexFault& fault) {
            const py::tuple told = py::make_tuple(fault.shard, fault.table, fault.entry);
            PyErr_SetObject(PyExc_LookupError, told.ptr());
        }
    });
}

void bind_rows(py::module_& module) {
    py::class_<mdata::RowRules>(module, "RowRules")
        .def(py::init([](Numbers pad, Numbers eod, bool mask_eod, bool restart_at_eod, bool apart) {
                 return mdata::RowRules{pad, eod, mask_eod, restart_at_eod, apart};
             }),
             py::arg("pad"), py::arg("eod"), py::arg("mask_eod"), py::arg("restart_at_eod"), py::arg("apart") = false);
    module.def("finish_rows", &finish_rows, py::arg("text").noconvert(), py::arg("counts").noconvert(),
               py::arg("cuts").noconvert(), py::arg("loss").noconvert(), py::arg("positions").noconvert(), py::arg("rules"));
    module.def("read_native", &read_native, py::arg("store"), py::arg("index"), py::arg("permutation"),
               py::arg("samples").noconvert(), py::arg("epoch"), py::arg("rows").noconvert(), py::arg("rules"),
               py::arg("threads"), py::arg("blocks") = py::none(), py::arg("blocks_key") = std::pair<std::uint64_t, std::uint64_t>());
    module.def("cumulative_lengths", &cumulative_lengths, py::arg("ends").noconvert(), py::arg("places").noconvert(),
               py::arg("inputs"));
}

}  // namespace

void mdata::bind_gather(py::module_& module) {
    bind_store(module);
    bind_sequences(module);
    bind_rows(module);
}
