def too_long(x):
@{70 times}    x += 1
