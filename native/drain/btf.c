// SPDX-License-Identifier: Apache-2.0
/* Where a member lies in a kernel struct, from BTF (include/uapi/linux/btf.h). Every offset is checked: the file may come
 * from anywhere. */
#define _GNU_SOURCE
#include "drain.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/btf.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_BYTES (256u << 20)
#define MAX_NESTING 16
#define KIND_ENUM64 19 /* newer than the headers of Debian 12's oldest sibling */

struct btf {
  char *file;
  const uint8_t *types;
  const char *strings;
  uint32_t types_len, strings_len, count;
  uint32_t *at; /* type id -> offset in types; id 0 is void */
};

static int read_all(int fd, char *to, size_t n) {
  for (size_t done = 0; done < n;) {
    ssize_t got = read(fd, to + done, n - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got ? -errno : -ENODATA;
    done += (size_t)got;
  }
  return 0;
}

static int read_file(const char *path, char **out, size_t *length) {
  struct stat st;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  int ret = fstat(fd, &st) ? -errno : st.st_size <= 0 || st.st_size > MAX_BYTES ? -EFBIG : 0;
  char *data = ret ? NULL : malloc((size_t)st.st_size);
  if (!ret) ret = data ? read_all(fd, data, (size_t)st.st_size) : -ENOMEM;
  close(fd);
  if (ret) free(data);
  else {
    *out = data;
    *length = (size_t)st.st_size;
  }
  return ret;
}

static int set_sections(struct btf *b, size_t length) {
  struct btf_header h;
  if (length < sizeof(h)) return -EPROTO;
  memcpy(&h, b->file, sizeof(h));
  if (h.magic != BTF_MAGIC || h.hdr_len < sizeof(h) || h.hdr_len > length) return -EPROTO;
  uint64_t rest = length - h.hdr_len;
  if ((uint64_t)h.type_off + h.type_len > rest || (uint64_t)h.str_off + h.str_len > rest || !h.str_len) return -EPROTO;
  b->types = (const uint8_t *)b->file + h.hdr_len + h.type_off;
  b->strings = b->file + h.hdr_len + h.str_off;
  b->types_len = h.type_len;
  b->strings_len = h.str_len;
  return b->strings[h.str_len - 1] ? -EPROTO : 0;
}

/* Bytes after the btf_type; -1: unknown kind, nothing after it can be found. */
static int64_t extra_of(const struct btf_type *t) {
  int64_t n = BTF_INFO_VLEN(t->info);
  switch (BTF_INFO_KIND(t->info)) {
  case BTF_KIND_INT:
  case BTF_KIND_VAR:
  case BTF_KIND_DECL_TAG:
    return 4;
  case BTF_KIND_ARRAY:
    return sizeof(struct btf_array);
  case BTF_KIND_STRUCT:
  case BTF_KIND_UNION:
  case BTF_KIND_DATASEC:
  case KIND_ENUM64:
    return 12 * n;
  case BTF_KIND_ENUM:
  case BTF_KIND_FUNC_PROTO:
    return 8 * n;
  case BTF_KIND_PTR:
  case BTF_KIND_FWD:
  case BTF_KIND_TYPEDEF:
  case BTF_KIND_VOLATILE:
  case BTF_KIND_CONST:
  case BTF_KIND_RESTRICT:
  case BTF_KIND_FUNC:
  case BTF_KIND_FLOAT:
  case BTF_KIND_TYPE_TAG:
    return 0;
  default:
    return -1;
  }
}

/* False outside the section. Copied because alignment is the file's choice. */
static bool type_at(const struct btf *b, uint64_t offset, struct btf_type *t) {
  if (offset + sizeof(*t) > b->types_len) return false;
  memcpy(t, b->types + offset, sizeof(*t));
  int64_t extra = extra_of(t);
  return extra >= 0 && offset + sizeof(*t) + (uint64_t)extra <= b->types_len;
}

static int index_types(struct btf *b) {
  struct btf_type t;
  b->at = malloc((b->types_len / sizeof(t) + 2) * sizeof(*b->at));
  if (!b->at) return -ENOMEM;
  b->count = 1;
  for (uint64_t o = 0; type_at(b, o, &t); o += sizeof(t) + (uint64_t)extra_of(&t)) b->at[b->count++] = (uint32_t)o;
  return 0;
}

int btf__open(const char *path, struct btf **out) {
  size_t length = 0;
  *out = NULL;
  struct btf *b = calloc(1, sizeof(*b));
  if (!b) return -ENOMEM;
  int ret = read_file(path, &b->file, &length);
  if (!ret) ret = set_sections(b, length);
  if (!ret) ret = index_types(b);
  if (ret) btf__close(b);
  else *out = b;
  return ret;
}

void btf__close(struct btf *b) {
  if (!b) return;
  free(b->at);
  free(b->file);
  free(b);
}

static const char *name_of(const struct btf *b, uint32_t offset) {
  return offset < b->strings_len ? b->strings + offset : "";
}

static bool is_compound(const struct btf_type *t) {
  return BTF_INFO_KIND(t->info) == BTF_KIND_STRUCT || BTF_INFO_KIND(t->info) == BTF_KIND_UNION;
}

/* Bit offset of a member of type `id`, also in its anonymous members; -ENOENT, or -ENOTSUP for a bit field. */
static int64_t bits_of(const struct btf *b, uint32_t id, const char *member, int nesting) {
  struct btf_type t;
  if (!id || id >= b->count || nesting > MAX_NESTING || !type_at(b, b->at[id], &t) || !is_compound(&t)) return -ENOENT;
  const uint8_t *first = b->types + b->at[id] + sizeof(t);
  for (uint32_t i = 0; i < BTF_INFO_VLEN(t.info); i++) {
    struct btf_member m;
    memcpy(&m, first + i * sizeof(m), sizeof(m));
    int64_t at = BTF_INFO_KFLAG(t.info) ? BTF_MEMBER_BIT_OFFSET(m.offset) : m.offset;
    bool is_bits = BTF_INFO_KFLAG(t.info) && BTF_MEMBER_BITFIELD_SIZE(m.offset);
    const char *name = name_of(b, m.name_off);
    if (*name && !strcmp(name, member)) return is_bits ? -ENOTSUP : at;
    int64_t inner = *name ? -ENOENT : bits_of(b, m.type, member, nesting + 1);
    if (inner >= 0) return at + inner;
  }
  return -ENOENT;
}

int64_t btf__offset(const struct btf *b, const char *type, const char *member) {
  struct btf_type t;
  for (uint32_t id = 1; id < b->count; id++) {
    if (!type_at(b, b->at[id], &t) || !is_compound(&t) || strcmp(name_of(b, t.name_off), type)) continue;
    int64_t bits = bits_of(b, id, member, 0);
    if (bits >= 0) return bits / 8;
  }
  return -ENOENT;
}
