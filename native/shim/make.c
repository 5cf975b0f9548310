// SPDX-License-Identifier: Apache-2.0
/* The segment of this process: a sealed memfd, or a file in a folder. Made at its first hooked call. */
#define _GNU_SOURCE
#include "objects.h"
#include "system.h"
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define HIGH_FD 700
#define NAMES 64
#define MFD_CLOEXEC_ 1u
#define MFD_ALLOW_SEALING_ 2u
#define ADD_SEALS 1033
#define SEALS 7 /* F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW */
#define LONG_NS 200000
/* Between the two readings that give the counter's rate, to know it to 0.05 %. */
#define LEAST_NS 200000
#define LEAST_TICKS 4000

struct shape {
  uint32_t blocks, bulk_bits, vital_bits;
  uint64_t block_bytes, sites_at, bytes; /* bytes: of the file; up to sites_at it is what older readers know */
};

static struct shape shape_of(uint32_t blocks) {
  struct shape s = {.blocks = blocks, .bulk_bits = SEG_BULK_BITS, .vital_bits = SEG_VITAL_BITS};
  if (seg_set.folder[0]) {
    s.bulk_bits = SEG_SMALL_BULK_BITS;
    s.vital_bits = SEG_SMALL_VITAL_BITS;
  }
  s.block_bytes = SEG_BLOCK_BYTES(s.vital_bits, s.bulk_bits);
  s.sites_at = SEG_HEADER_BYTES + s.blocks * s.block_bytes;
  s.bytes = s.sites_at + (seg_set.folder[0] ? 0 : SEG_SITE_BYTES); /* in a folder pages are dear, and a store a risk */
  return s;
}

static void put_number(char *to, uint64_t value) {
  char digits[24];
  int n = 0;
  do digits[n++] = (char)('0' + value % 10);
  while (value /= 10);
  while (n) *to++ = digits[--n];
  *to = 0;
}

static bool path_of(char *path, size_t size, int try) {
  size_t length = strlen(seg_set.folder);
  if (length + 64 > size) return false;
  memcpy(path, seg_set.folder, length);
  path[length++] = '/';
  put_number(path + length, (uint64_t)syscall(SYS_getpid));
  strcat(path, ".");
  put_number(path + strlen(path), seg_start_ticks());
  if (try) {
    strcat(path, ".");
    put_number(path + strlen(path), (uint64_t)try);
  }
  strcat(path, ".seg");
  return true;
}

/* Whom it is for says the folder: one with a group of its own (setgid) shares what is in it with that group. */
static void share(int fd) {
  struct stat folder;
  if (syscall(SYS_newfstatat, AT_FDCWD, seg_set.folder, &folder, 0) || !(folder.st_mode & S_ISGID)) return;
  syscall(SYS_fchmod, fd, 0600 | (folder.st_mode & 0060));
}

/* The name may be taken: by what this process ran before an exec, or by its like in another pid namespace. */
static int open_file(char *path, size_t size) {
  if (!seg_set.folder[0])
    return (int)syscall(SYS_memfd_create, seg_injected ? SEG_INJECTED_NAME : SEG_NAME,
                        MFD_CLOEXEC_ | MFD_ALLOW_SEALING_);
  int fd = -1;
  errno = EEXIST;
  for (int try = 0; try < NAMES && fd < 0 && errno == EEXIST && path_of(path, size, try); try++)
    fd = sys_open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd >= 0) share(fd);
  else path[0] = 0;
  return fd;
}

/* Its end tells who can't see this process: the kernel gives the lock up with the process, or with the descriptor at an
 * exec, and a forked child has none. Only once the descriptor is where it stays: closing another one of the file would end it. */
static bool lock_file(int fd) {
  struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
  return !syscall(SYS_fcntl, fd, F_SETLK, &all);
}

/* Out of the way of programs that count on low numbers. */
static int move_high(int fd) {
  int high = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, HIGH_FD);
  if (high < 0) return fd;
  sys_close(fd);
  return high;
}

/* Beyond the limit of file sizes ftruncate would kill the program with SIGXFSZ. */
static bool fits_limit(uint64_t bytes) {
  struct rlimit limit;
  if (syscall(SYS_prlimit64, 0, RLIMIT_FSIZE, NULL, &limit)) return true;
  return limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

/* As many blocks as the limits of this process allow. */
static uint8_t *map_file(int fd, struct shape *s) {
  for (uint32_t blocks = SEG_BLOCKS; blocks; blocks /= 4) {
    *s = shape_of(blocks);
    if (!fits_limit(s->bytes) || syscall(SYS_ftruncate, fd, s->bytes)) continue;
    if (seg_set.folder[0] && syscall(SYS_fallocate, fd, 0, 0, (uint64_t)SEG_HEADER_BYTES)) return NULL;
    void *at = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at != MAP_FAILED) return at;
  }
  return NULL;
}

static void set_rate(struct seg_header *h) {
  do seg_pair(&h->counter, &h->mono_ns);
  while (h->mono_ns - seg_set.mono_ns < LEAST_NS || h->counter - seg_set.counter < LEAST_TICKS);
  h->real_ns = seg_clock_ns(CLOCK_REALTIME) - (seg_clock_ns(CLOCK_MONOTONIC) - h->mono_ns);
  uint64_t ticks = h->counter - seg_set.counter, ns = h->mono_ns - seg_set.mono_ns;
  h->ns_per_tick = (uint64_t)(((unsigned __int128)ns << 32) / ticks);
  h->ticks_per_s = (uint64_t)((unsigned __int128)ticks * 1000000000u / ns);
  h->long_ticks = (uint64_t)((unsigned __int128)LONG_NS * ticks / ns);
}

static void fill(struct seg_header *h, const struct shape *s) {
  h->version = SEG_VERSION;
  h->header_bytes = SEG_HEADER_BYTES;
  h->block_bytes = s->block_bytes;
  h->total_bytes = s->sites_at;
  h->sites_at = s->bytes > s->sites_at ? s->sites_at : 0;
  h->n_blocks = s->blocks;
  h->bulk_bits = s->bulk_bits;
  h->vital_bits = s->vital_bits;
  h->comm_bits = SEG_COMM_BITS;
  h->pid = (uint32_t)syscall(SYS_getpid);
  h->uid = (uint32_t)syscall(SYS_getuid);
  h->start_ticks = seg_start_ticks();
  h->settings = seg_set.word;
  memcpy(h->hooks, seg_hook_bits, sizeof(h->hooks));
  memcpy(h->words, seg_words_of, sizeof(h->words));
  set_rate(h);
}

/* A child of a fork has its parent's descriptor, and nothing to do with it. */
static struct {
  int fd;
  uint64_t device, inode;
  const struct seg_header *header; /* mapped still */
} parents = {.fd = -1};

static void close_parents(void) {
  if (parents.fd >= 0 && seg_same_file(parents.fd, parents.device, parents.inode)) sys_close(parents.fd);
  parents.fd = -1;
}

bool seg_make(struct seg_process *p) {
  char path[512] = "";
  struct shape s;
  close_parents();
  int fd = seg_set.off ? -1 : open_file(path, sizeof(path));
  if (fd < 0) return false;
  uint8_t *at = map_file(fd, &s);
  if (!at) {
    sys_close(fd);
    if (path[0]) syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    return false;
  }
  madvise(at, s.bytes, MADV_DONTDUMP);
  p->fd = move_high(fd);
  seg_identify(p->fd, &p->device, &p->inode);
  parents.fd = p->fd;
  parents.device = p->device;
  parents.inode = p->inode;
  p->header = (struct seg_header *)(void *)at;
  p->blocks = at + SEG_HEADER_BYTES;
  fill(p->header, &s);
  if (parents.header) seg_inherit_sites(p->header, parents.header);
  parents.header = p->header;
  struct seg_who *who = (struct seg_who *)(void *)(at + SEG_WHO_AT);
  seg_introduce(who);
  if (path[0] && lock_file(p->fd)) who->flags |= SEG_LOCKED;
  if (!path[0]) syscall(SYS_fcntl, p->fd, ADD_SEALS, SEALS);
  __atomic_store_n(&p->header->magic, SEG_MAGIC, __ATOMIC_RELEASE);
  seg_hello(p);
  return true;
}

/* In a folder a store into a page that the file system has no room for would be a SIGBUS. */
bool seg_reserve(struct seg_process *p, uint8_t *block) {
  if (!seg_set.folder[0]) return true;
  uint64_t bytes = p->header->block_bytes, at = SEG_HEADER_BYTES + (uint64_t)(block - p->blocks);
  return seg_same_file(p->fd, p->device, p->inode) && !syscall(SYS_fallocate, p->fd, 0, at, bytes);
}
