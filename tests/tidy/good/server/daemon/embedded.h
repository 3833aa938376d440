// The service inside a program.
#pragma once
