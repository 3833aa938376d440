"""libmuond_client.so through ctypes: what client/c/muond.h declares, and nothing of its own.

ctypes releases the interpreter's lock during each call, so other threads go on while one waits.
"""

import ctypes
import functools
import os
import pathlib

from muond import errors

ABI_VERSION = 1
NAME = "libmuond_client.so"

_text, _size, _pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
_i32, _i64, _f64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class _Growing(ctypes.Structure):
    """A structure that starts with its own size."""

    def __init__(self, **values):
        super().__init__(struct_bytes=ctypes.sizeof(type(self)), **values)


class ServiceOptions(_Growing):
    _fields_ = [("struct_bytes", _size), ("backend", _text), ("backend_bytes", _size),
                ("listen", _text), ("listen_bytes", _size), ("log_level", _text),
                ("log_level_bytes", _size), ("threads", _i64), ("checkpoint_dir", _text),
                ("checkpoint_dir_bytes", _size), ("checkpoint_every_steps", _i64)]


class SessionOptions(_Growing):
    _fields_ = [("struct_bytes", _size), ("endpoint", _text), ("endpoint_bytes", _size),
                ("service", _pointer), ("call_timeout", _f64), ("step_timeout", _f64),
                ("bulk_timeout", _f64), ("chunk_bytes", _i64), ("transport", _text),
                ("transport_bytes", _size), ("memory", _i32), ("device", _i32),
                ("gradient_dtype", _i32), ("reserved", _i32), ("recovery_timeout", _f64)]


class Position(_Growing):
    _fields_ = [("struct_bytes", _size), ("generation", _i64), ("next_step", _i64),
                ("loss_scale", _f64), ("state", _i32), ("daemons", _i32), ("last_step", _i64),
                ("last_applied", _i32), ("last_cause", _i32)]


class Begin(_Growing):
    _fields_ = [("struct_bytes", _size), ("step", _i64), ("loss_scale", _f64),
                ("micro_batches", _i64), ("hyperparameters", _text),
                ("hyperparameters_bytes", _size)]


class Outcome(_Growing):
    _fields_ = [("struct_bytes", _size), ("step", _i64), ("version", _i64),
                ("applied_steps", _i64), ("skipped_steps", _i64), ("consecutive_skips", _i64),
                ("newton_schulz_calls", _i64), ("newton_schulz_fallbacks", _i64),
                ("zero_inputs", _i64), ("nonfinite_elements", _i64), ("loss_scale", _f64),
                ("next_loss_scale", _f64), ("grad_norm", _f64), ("clip_coefficient", _f64),
                ("applied", _i32), ("cause", _i32)]


class Names(ctypes.Structure):
    _fields_ = [("names", ctypes.POINTER(_text)), ("bytes", ctypes.POINTER(_size)),
                ("count", _size)]


class Source(ctypes.Structure):
    _fields_ = [("parameter", _text), ("parameter_bytes", _size), ("data", _pointer),
                ("stream", _pointer), ("elements", _i64), ("slice", _i64), ("micro_batch", _i64),
                ("dtype", _i32), ("memory", _i32), ("device", _i32), ("reserved", _i32)]


class Sink(ctypes.Structure):
    _fields_ = [("parameter", _text), ("parameter_bytes", _size), ("data", _pointer),
                ("stream", _pointer), ("elements", _i64), ("slice", _i64), ("dtype", _i32),
                ("memory", _i32), ("device", _i32), ("reserved", _i32)]


_out = ctypes.POINTER
_error = _out(_pointer)
# Name -> arguments; all of these return a code and take the error last.
_CALLS = {
    "service_start": [_out(ServiceOptions), _out(_pointer)],
    "session_open": [_out(SessionOptions), _text, _size, _out(_pointer)],
    "session_close": [_pointer, _out(_i32)],
    "session_position": [_pointer, _out(Position)],
    "session_describe": [_pointer, _out(_pointer)],
    "session_status": [_pointer, _out(_pointer)],
    "session_digest": [_pointer, _out(_pointer)],
    "session_last_outcome": [_pointer, _out(_pointer)],
    "session_add_parameters": [_pointer, _text, _size],
    "session_rejoin": [_pointer],
    "session_save": [_pointer, _out(_pointer)],
    "session_restore": [_pointer, _text, _size, _i32, _out(_pointer)],
    "session_await_restore": [_pointer, _f64],
    "session_raise_generation": [_pointer, _text, _size],
    "session_initialize": [_pointer, _out(Source), _size, _out(_i32)],
    "session_reinitialize": [_pointer, _out(Source), _size, _text, _size, _out(_i32)],
    "session_pull": [_pointer, _i64, _out(Sink), _size, _i32],
    "session_step": [_pointer, _out(Begin), _out(Source), _size, _out(Names), _out(Outcome)],
    "session_step_and_pull": [_pointer, _out(Begin), _out(Source), _size, _out(Names), _out(Sink),
                              _size, _out(Outcome)],
    "session_begin": [_pointer, _out(Begin)],
    "session_push": [_pointer, _out(Source), _size],
    "session_finish": [_pointer, _out(Names), _out(Outcome)],
    "session_finish_and_pull": [_pointer, _out(Names), _out(Sink), _size, _out(Outcome)],
    "session_transports": [_pointer, _out(_pointer)],
    "session_skip": [_pointer, _i32, _f64, _out(Outcome)],
}
_OTHERS = {
    "abi_version": ([], ctypes.c_uint32),
    "version": ([], _text),
    "has_service": ([], _i32),
    "error_message": ([_pointer, _out(_size)], _pointer),
    "error_free": ([_pointer], None),
    "text_data": ([_pointer, _out(_size)], _pointer),
    "text_free": ([_pointer], None),
    "service_address": ([_pointer, _out(_size)], _pointer),
    "service_free": ([_pointer], None),
    "session_free": ([_pointer], None),
}


def path():
    """Where the library is: MUOND_LIBRARY, or beside this file."""
    return os.environ.get("MUOND_LIBRARY") or str(pathlib.Path(__file__).parent / NAME)


@functools.cache
def load():
    """The library, its functions declared. LibraryError when it can't be had."""
    try:
        library = ctypes.CDLL(path())
    except OSError as error:
        raise errors.LibraryError(f"{path()}: {error}") from None
    for name, (arguments, result) in _OTHERS.items():
        function = getattr(library, f"muond_{name}")
        function.argtypes, function.restype = arguments, result
    if library.muond_abi_version() != ABI_VERSION:
        raise errors.LibraryError(
            f"{path()}: has interface {library.muond_abi_version()}, this package needs "
            f"{ABI_VERSION}")
    for name, arguments in _CALLS.items():
        try:
            function = getattr(library, f"muond_{name}")
        except AttributeError:
            raise errors.LibraryError(f"{path()}: it lacks muond_{name}: it is older than this "
                                      "package") from None
        function.argtypes, function.restype = [*arguments, _error], _i32
    return library


def version():
    return load().muond_version().decode()


def text(function, handle):
    """What an accessor of `handle` says: function(handle, &bytes)."""
    size = _size()
    data = function(handle, ctypes.byref(size))
    return ctypes.string_at(data, size.value).decode("utf-8", "replace")


def call(name, *arguments, opening=False):
    """Calls muond_<name>; an error becomes the exception of its kind."""
    library = load()
    error = _pointer()
    code = getattr(library, f"muond_{name}")(*arguments, ctypes.byref(error))
    if code == 0:
        return
    try:
        message = text(library.muond_error_message, error) or f"{name}: code {code}"
    finally:
        library.muond_error_free(error)
    raise errors.from_code(code, message, opening)
