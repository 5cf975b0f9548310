/* NCCL's hash of a communicator (2.26 and later), and unique ids. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "api.h"

struct hash {
  uint64_t a, b;
};

static void eat(struct hash *hash, const void *bytes, size_t length) {
  const char *at = bytes;
  hash->a ^= length;
  while (length) {
    uint64_t word = 0;
    size_t part = length < 8 ? length : 8;
    memcpy(&word, at, part);
    at += part;
    length -= part;
    hash->a += hash->b;
    hash->b ^= hash->a;
    hash->a ^= hash->a >> 31;
    hash->a *= 0x9de62bbc8cef3ce3;
    hash->b ^= hash->b >> 32;
    hash->b *= 0x485cd6311b599e79;
    hash->a += word;
  }
}

static uint64_t digest(const struct hash *hash) {
  uint64_t value = hash->a;
  value ^= value >> 31;
  value *= 0xbac3bd562846de6b;
  value += hash->b;
  value ^= value >> 32;
  value *= 0x995a187a14e7b445;
  return value;
}

uint64_t sim_hash_id(const ncclUniqueId *id) {
  struct hash hash = {1, 1};
  eat(&hash, id, sizeof(*id));
  return digest(&hash);
}

uint64_t sim_hash_child(uint64_t parent, unsigned ordinal, int color) {
  struct hash hash = {1, 1};
  eat(&hash, &parent, sizeof(parent));
  eat(&hash, &ordinal, sizeof(ordinal));
  eat(&hash, &color, sizeof(color));
  return digest(&hash);
}

/* 8 random bytes, and where the real one would listen: nobody does here. */
API ncclGetUniqueId(ncclUniqueId *id) {
  struct {
    uint64_t magic;
    uint16_t port;
  } random;
  if (!id) return ncclInvalidArgument;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) return ncclSystemError;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  address.sin_port = htons((uint16_t)(32768 + random.port % 28000));
  memset(id, 0, sizeof(*id));
  memcpy(id->internal, &random.magic, 8);
  memcpy(id->internal + 8, &address, sizeof(address));
  return ncclSuccess;
}
ALIAS(GetUniqueId);
