// Marks what the shared library exports; everything else is hidden.
#pragma once

#if defined(LONGSPAN_STATIC)
#define LONGSPAN_API
#else
#define LONGSPAN_API __attribute__((visibility("default")))
#endif
