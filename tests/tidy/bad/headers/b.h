// What it knows.

#ifndef B_H
#define B_H
#endif
