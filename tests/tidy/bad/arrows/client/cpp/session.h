// A seat in a run.
#pragma once
