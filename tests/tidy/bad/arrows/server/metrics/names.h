// Metrics know values only.
#pragma once

#include "server/registry/a.h"
