// A file as read-only memory without an open descriptor: blends of 10,000 corpora open under a limit of 1,024.
//
// The descriptor is closed once the map exists (Python's mmap keeps a copy of it). An empty file, which cannot be
// mapped, is an empty map. If a file is truncated while it is mapped, reading the missing part of the map ends the
// program with SIGBUS, unless it is read under a guard (map_guard.hpp).
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <system_error>

#include "file_identity.hpp"

namespace mdata {

class FileMap {
public:
    // Throws std::system_error with the errno of what failed; ESTALE: it is not the file that is expected.
    explicit FileMap(const char* path, const std::optional<FileIdentity>& expected = std::nullopt) {
        const int file = ::open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) fail(errno);
        struct stat facts {};
        int error = ::fstat(file, &facts) != 0 ? errno : 0;
        if (error == 0 && expected && *expected != identity_of(facts)) error = ESTALE;
        if (error == 0) error = map(file, facts);
        ::close(file);
        if (error != 0) fail(error);
    }

    FileMap(const FileMap&) = delete;
    FileMap& operator=(const FileMap&) = delete;

    ~FileMap() {
        if (size_ != 0) ::munmap(data_, size_);
    }

    std::span<const std::uint8_t> bytes() const { return {static_cast<const std::uint8_t*>(data_), size_}; }

private:
    int map(int file, const struct stat& facts) {
        if (S_ISDIR(facts.st_mode)) return EISDIR;
        const auto size = static_cast<std::size_t>(facts.st_size);
        if (size == 0) return 0;
        void* const data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
        if (data == MAP_FAILED) return errno;
        data_ = data;
        size_ = size;
        return 0;
    }

    [[noreturn]] static void fail(int error) { throw std::system_error(error, std::generic_category()); }

    void* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace mdata
