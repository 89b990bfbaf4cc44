/* SPDX-License-Identifier: Apache-2.0 */
/* What the library was compiled from, so that nobody calls one that no longer fits. */

#include "engine.h"

/* The SHA-256 of all sources, in hexadecimal; setup.py gives it. */
API const char *dlcp_sources(void) {
    return DLCP_SOURCES;
}
