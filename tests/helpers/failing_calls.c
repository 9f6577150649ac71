// Calls of the C library that fail on purpose: preloaded (LD_PRELOAD), so that those of Python, of our extension and
// of every library are met alike. Only calls on files whose path holds a given text count, by path or by descriptor.
// failing_calls_arm: call number `at` (from 0) fails with `code`; `lasting`: all after it do, too; at < 0: none.
// failing_calls_disarm returns how many were seen. Used by tests/helpers/failing_calls.py.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_FILES = 4096, PATH_BYTES = 512, NAME_BYTES = 64 };

static char text[PATH_BYTES];
static atomic_int armed, seen;
static int fail_at, fail_code, fail_lasting;
static char last_name[NAME_BYTES];
static atomic_bool ours[MOST_FILES];

void failing_calls_arm(const char *path, int at, int code, int lasting) {
    snprintf(text, sizeof text, "%s", path);
    fail_at = at, fail_code = code, fail_lasting = lasting;
    seen = 0;
    last_name[0] = 0;
    armed = 1;
}

int failing_calls_disarm(void) {
    armed = 0;
    return seen;
}

// The call that failed first.
const char *failing_calls_name(void) { return last_name; }

// Whether this call fails; errno is set.
static int fails(const char *name) {
    const int number = atomic_fetch_add(&seen, 1);
    if (fail_at < 0 || number < fail_at || (number > fail_at && !fail_lasting)) return 0;
    if (number == fail_at) snprintf(last_name, sizeof last_name, "%s", name);
    errno = fail_code;
    return 1;
}

static int path_fails(const char *name, const char *path) {
    return armed && path != NULL && strstr(path, text) != NULL && fails(name);
}

static int file_fails(const char *name, int file) {
    return armed && file >= 0 && file < MOST_FILES && ours[file] && fails(name);
}

static int opened(int file, const char *path) {
    if (file >= 0 && file < MOST_FILES) ours[file] = armed && path != NULL && strstr(path, text) != NULL;
    return file;
}

#define REAL(type, name, ...)                                                  \
    static type (*real)(__VA_ARGS__);                                          \
    if (real == NULL) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...) {                               \
        REAL(int, name, const char *, int, ...);                               \
        va_list more;                                                          \
        va_start(more, flags);                                                 \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                          \
        return path_fails("open", path) ? -1 : opened(real(path, flags, mode), path); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                           \
    int name(int folder, const char *path, int flags, ...) {                   \
        REAL(int, name, int, const char *, int, ...);                          \
        va_list more;                                                          \
        va_start(more, flags);                                                 \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                          \
        return path_fails("openat", path) ? -1 : opened(real(folder, path, flags, mode), path); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                            \
    FILE *name(const char *path, const char *mode) {                           \
        REAL(FILE *, name, const char *, const char *);                        \
        return path_fails("fopen", path) ? NULL : real(path, mode);            \
    }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    return path_fails("opendir", path) ? NULL : real(path);
}

// Like the system's: the descriptor is gone, whatever close says.
int close(int file) {
    REAL(int, close, int);
    const int failed = file_fails("close", file);
    const int code = errno;
    if (file >= 0 && file < MOST_FILES) ours[file] = 0;
    const int done = real(file);
    if (failed) errno = code;
    return failed ? -1 : done;
}

#define BY_FILE(type, name, shown, parameters, arguments, ...)                 \
    type name parameters {                                                     \
        REAL(type, name, __VA_ARGS__);                                         \
        return file_fails(shown, file) ? (type)-1 : real arguments;            \
    }
BY_FILE(ssize_t, read, "read", (int file, void *to, size_t count), (file, to, count), int, void *, size_t)
BY_FILE(ssize_t, write, "write", (int file, const void *of, size_t count), (file, of, count), int, const void *, size_t)
#define PREAD(name, offset_t)                                                  \
    BY_FILE(ssize_t, name, "pread", (int file, void *to, size_t count, offset_t at), (file, to, count, at), int, void *, size_t, offset_t)
PREAD(pread, off_t)
PREAD(pread64, off64_t)
#define PWRITE(name, offset_t)                                                 \
    BY_FILE(ssize_t, name, "pwrite", (int file, const void *of, size_t count, offset_t at), (file, of, count, at), int, const void *, size_t, offset_t)
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
#define PREADV(name, offset_t)                                                 \
    BY_FILE(ssize_t, name, "preadv", (int file, const struct iovec *to, int count, offset_t at), (file, to, count, at), int, const struct iovec *, int, offset_t)
PREADV(preadv, off_t)
PREADV(preadv64, off64_t)
BY_FILE(int, fsync, "fsync", (int file), (file), int)
BY_FILE(int, fdatasync, "fdatasync", (int file), (file), int)
BY_FILE(int, ftruncate, "ftruncate", (int file, off_t size), (file, size), int, off_t)
BY_FILE(int, ftruncate64, "ftruncate", (int file, off64_t size), (file, size), int, off64_t)
BY_FILE(off_t, lseek, "lseek", (int file, off_t to, int from), (file, to, from), int, off_t, int)
BY_FILE(off64_t, lseek64, "lseek", (int file, off64_t to, int from), (file, to, from), int, off64_t, int)
BY_FILE(int, flock, "flock", (int file, int how), (file, how), int, int)
BY_FILE(int, fstat, "fstat", (int file, struct stat *facts), (file, facts), int, struct stat *)
BY_FILE(int, fstat64, "fstat", (int file, struct stat64 *facts), (file, facts), int, struct stat64 *)

#define MMAP(name, offset_t)                                                   \
    void *name(void *at, size_t size, int protection, int flags, int file, offset_t offset) { \
        REAL(void *, name, void *, size_t, int, int, int, offset_t);           \
        return file_fails("mmap", file) ? MAP_FAILED : real(at, size, protection, flags, file, offset); \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

#define BY_PATH(name, parameters, arguments, ...)                              \
    int name parameters {                                                      \
        REAL(int, name, __VA_ARGS__);                                          \
        return path_fails(#name, path) ? -1 : real arguments;                  \
    }
BY_PATH(stat, (const char *path, struct stat *facts), (path, facts), const char *, struct stat *)
BY_PATH(stat64, (const char *path, struct stat64 *facts), (path, facts), const char *, struct stat64 *)
BY_PATH(lstat, (const char *path, struct stat *facts), (path, facts), const char *, struct stat *)
BY_PATH(lstat64, (const char *path, struct stat64 *facts), (path, facts), const char *, struct stat64 *)
BY_PATH(fstatat, (int folder, const char *path, struct stat *facts, int flags), (folder, path, facts, flags), int, const char *, struct stat *, int)
BY_PATH(fstatat64, (int folder, const char *path, struct stat64 *facts, int flags), (folder, path, facts, flags), int, const char *, struct stat64 *, int)
BY_PATH(access, (const char *path, int how), (path, how), const char *, int)
BY_PATH(mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
BY_PATH(rmdir, (const char *path), (path), const char *)
BY_PATH(unlink, (const char *path), (path), const char *)
BY_PATH(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), int, const char *, int)
BY_PATH(rename, (const char *path, const char *to), (path, to), const char *, const char *)
