// Everything: attention over very long sequences.
#pragma once

#include "longspan/attention.h"
#include "longspan/block_mask.h"
#include "longspan/block_pattern.h"
#include "longspan/communicator.h"
#include "longspan/error.h"
#include "longspan/exchange.h"
#include "longspan/inspect.h"
#include "longspan/memory.h"
#include "longspan/pattern.h"
#include "longspan/picture.h"
#include "longspan/plan.h"
#include "longspan/ring.h"
#include "longspan/tensor_view.h"
#include "longspan/threads.h"
#include "longspan/version.h"
