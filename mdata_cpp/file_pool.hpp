// Files that are read by pread, with a limited number open at once: 10,000 corpora under a limit of 1,024.
//
// A file is opened when it is used; if the pool is full, the least recently used one is closed. A reader shares
// ownership of the descriptor, which is closed with its last owner: no thread loses a file that it is reading, and the
// pool exceeds its limit by at most one descriptor per reading thread. A file that is opened again must be the one that
// was first seen (device, inode, size, time of change), otherwise the error is ESTALE. One lock for all pools, held for
// a few instructions and over no system call, and taken by fork. A child shares its parent's descriptors, which is
// harmless: pread moves no position.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "file_identity.hpp"
#include "fork_lock.hpp"

namespace mdata {

// An open descriptor. Throws std::system_error where it cannot be opened, or is not the file that is expected.
class OpenFile {
public:
    OpenFile(const std::string& path, const FileIdentity& expected) : file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (file_ < 0) throw std::system_error(errno, std::generic_category());
        struct stat facts {};
        const int error = ::fstat(file_, &facts) != 0 ? errno : identity_of(facts) == expected ? 0 : ESTALE;
        if (error == 0) return;
        ::close(file_);
        throw std::system_error(error, std::generic_category());
    }

    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;

    ~OpenFile() { ::close(file_); }

    // The bytes from `at` on, as many as fit or the file has. Throws std::system_error.
    std::size_t read(std::span<std::byte> into, std::int64_t at) const {
        std::size_t got = 0;
        while (got < into.size()) {
            const ssize_t part = ::pread(file_, into.data() + got, into.size() - got, at + static_cast<std::int64_t>(got));
            if (part < 0 && errno == EINTR) continue;
            if (part < 0) throw std::system_error(errno, std::generic_category());
            if (part == 0) break;
            got += static_cast<std::size_t>(part);
        }
        return got;
    }

private:
    int file_;
};

class PooledFile;

class FilePool {
public:
    // At most so many open files; 0: a quarter of the descriptors that the process may have, at most 16,384.
    explicit FilePool(std::size_t most = 0) : most_(most) {}

    FilePool(const FilePool&) = delete;
    FilePool& operator=(const FilePool&) = delete;

    std::size_t most() const {
        constexpr rlim_t kMost = 1 << 14;
        struct rlimit limit {};
        if (most_ != 0) return most_;
        if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
        return std::max<std::size_t>(1, std::min(limit.rlim_cur / 4, kMost));
    }

    std::size_t num_open() const {
        const std::scoped_lock locked(lock());
        return recent_.size();
    }

private:
    friend class PooledFile;
    using Shares = std::list<std::shared_ptr<const OpenFile>>;

    static std::mutex& lock() { return fork_lock<FilePool>(); }

    // Let go of all but the `most` files used last; under the lock. What is returned is closed outside of it.
    Shares shrink(std::size_t most);

    const std::size_t most_;
    std::list<PooledFile*> recent_;  // the open ones; the one used last stands first
};

class PooledFile {
public:
    // Nothing is opened before it is used. The pool lives as long as its files.
    PooledFile(std::shared_ptr<FilePool> pool, std::string path, const FileIdentity& identity)
        : pool_(std::move(pool)), path_(std::move(path)), identity_(identity) {}

    PooledFile(const PooledFile&) = delete;
    PooledFile& operator=(const PooledFile&) = delete;

    ~PooledFile() {
        const std::scoped_lock locked(FilePool::lock());
        if (share_) pool_->recent_.erase(place_);
    }

    const std::string& path() const { return path_; }

    // A share of the open file. Throws as OpenFile does.
    std::shared_ptr<const OpenFile> use() {
        {
            const std::scoped_lock locked(FilePool::lock());
            if (share_) {
                pool_->recent_.splice(pool_->recent_.begin(), pool_->recent_, place_);
                return share_;
            }
        }
        return keep(open());
    }

private:
    friend class FilePool;

    // Where descriptors ran out, those of the pool are given up first.
    std::shared_ptr<const OpenFile> open() const {
        try {
            return std::make_shared<OpenFile>(path_, identity_);
        } catch (const std::system_error& error) {
            if (error.code().value() != EMFILE && error.code().value() != ENFILE) throw;
        }
        {
            FilePool::Shares closed;
            const std::scoped_lock locked(FilePool::lock());
            closed = pool_->shrink(0);
        }
        return std::make_shared<OpenFile>(path_, identity_);
    }

    std::shared_ptr<const OpenFile> keep(std::shared_ptr<const OpenFile> opened) {
        const std::size_t most = pool_->most();
        FilePool::Shares closed;  // these, and `opened` where another thread was faster, are closed behind the lock
        const std::scoped_lock locked(FilePool::lock());
        if (!share_) {
            share_ = opened;
            pool_->recent_.push_front(this);
            place_ = pool_->recent_.begin();
            closed = pool_->shrink(most);
        }
        return share_;
    }

    const std::shared_ptr<FilePool> pool_;
    const std::string path_;
    const FileIdentity identity_;
    std::shared_ptr<const OpenFile> share_;    // the pool's, while it is one of its open files
    std::list<PooledFile*>::iterator place_;  // where it stands among them
};

inline FilePool::Shares FilePool::shrink(std::size_t most) {
    Shares closed;
    while (recent_.size() > most) {
        closed.push_back(std::exchange(recent_.back()->share_, nullptr));
        recent_.pop_back();
    }
    return closed;
}

}  // namespace mdata
