/* SPDX-License-Identifier: Apache-2.0 */
/* The library's sources, so that an outdated one is never called. */

#include "engine.h"

/* SHA-256 of all sources, in hexadecimal; set by setup.py. */
API const char *dlcp_sources(void) {
    return DLCP_SOURCES;
}
