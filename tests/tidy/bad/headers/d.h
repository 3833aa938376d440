// What it knows,
// and more.

#include <string>
#pragma once
