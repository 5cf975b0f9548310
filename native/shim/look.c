// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include "objects.h"
#include "system.h"

void seg_look_around(void) {}
