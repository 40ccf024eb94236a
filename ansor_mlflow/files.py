"""Files that are either whole or not there, whenever the process or the machine stops; and where they may be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from ansor_mlflow.errors import MachineError

if TYPE_CHECKING:
    from zipfile import ZipFile

_RESERVE_BYTES = 8 * 2**20
_SPARE_BYTES = 2**24  # bytes that an archive may grow by: small ones may have been packed by other programs
_MAX_NAME_BYTES = 255  # longest name of a file on Linux
_OWNER_LOCK = ".owner.lock"
_NEW_PREFIX = "ansor_mlflow-new-"
_YOUNG_S = 600.0  # age of a scratch directory that its owner may be about to lock
_MACHINE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE)
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""What the system, and others who pass it on as text, say of a full disk."""
_UNWRITABLE = (*_DISK_FULL, os.strerror(errno.EROFS), "database or disk is full", "readonly database")


def path_below(folder: Path, name: str) -> Path:
    """The path below a folder that a name means which came from a file, a server or a URI; a ValueError where it is no
    plain relative path, or a link on the way leads out of the folder.

    Every such name passes here before anything is read or written under it.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    is_plain = name.isprintable() and not any(p in ("/", "//", "..") for p in parts) if parts else False
    if not is_plain or max(len(os.fsencode(part)) for part in parts) > _MAX_NAME_BYTES:
        raise ValueError(f"{name!r:.100} names no file below a folder")
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(f"{name!r:.100} is a link to something outside of its folder")
    return path


def sha256_of_file(path: Path, num_bytes: float = math.inf) -> str:
    """The SHA-256 of a file, or of its first bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    # a few of them fit into the cache of a CPU: a larger buffer is no faster, and its pages take time to make
    buffer = memoryview(bytearray(1 << 18))
    with path.open("rb", buffering=0) as file:
        while num_bytes and (size := file.readinto(buffer[: int(min(len(buffer), num_bytes))])):
            digest.update(buffer[:size])
            num_bytes -= size
    return digest.hexdigest()


def require_stored(archive: ZipFile, num_bytes: int) -> None:
    """Checks that what is in an archive takes no more than the archive's own bytes, before anything of it is unpacked;
    else it was packed, or has parts several times, and is a ValueError.

    NumPy stores files as they are. Python reads no more of one than the archive says that it has.
    """
    size = sum(entry.file_size for entry in archive.infolist())
    if size > num_bytes + _SPARE_BYTES:
        raise ValueError(f"its {num_bytes} bytes would unpack to {size}, and what is read is not packed")


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name, and is on the disk, once all of it was written; nothing is left after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # what failed before is the error to report
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk: without it, a file may lose its name when the machine stops."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def replace_directory(new: Path, directory: Path) -> None:
    """Puts a whole directory, whose files are on the disk, in the place of another at once; that one is removed.

    Both are on one file system. Where it cannot let two names change places, there is a moment in which there
    is neither, and the old one is beside the new.
    """
    if directory.exists():
        if not _exchange(new, directory):
            aside = directory.with_name(f".{directory.name}.old")
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
            new.rename(directory)
            new = aside
        sync_folder(directory.parent)
        shutil.rmtree(new, ignore_errors=True)
    else:
        new.rename(directory)
        sync_folder(directory.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Lets two names change places; False where the system or the file system does not know how."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    at_fdcwd, rename_exchange = -100, 2
    if not libc.renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


@contextmanager
def translated_disk_errors() -> Iterator[None]:
    """Translates what the system says of a full disk or a file that may not be written, whoever passes it on."""
    try:
        yield
    except MachineError:
        raise
    except Exception as err:
        is_ours = isinstance(err, OSError) and err.errno in _MACHINE_ERRNOS
        if not is_ours and not any(sign in str(err) for sign in _UNWRITABLE):
            raise
        what = " ".join(str(err).split())[:300]
        raise MachineError(f"a file cannot be read or written ({what}); free space, or work in another folder") from err


def write_text(path: Path, text: str) -> None:
    """Writes a whole file, or leaves it as it was."""
    with new_file(path) as file:
        file.write(text.encode())


def append(path: Path, data: bytes) -> None:
    """Appends to a file, and flushes it to the disk; takes back what was written if that fails."""
    path.touch()
    size = path.stat().st_size
    try:
        with path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        with contextlib.suppress(OSError):  # the last line is ended before the next one is appended
            os.truncate(path, size)
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from err
        raise


def end_last_line(path: Path) -> None:
    """Ends the last line of a file: its writer may have died in it, or just before the end."""
    path.touch()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return
    append(path, b"\n")


def is_full(directory: Path) -> bool:
    """Whether a directory's disk has no more than the reserve with which a run still ends in good order."""
    return shutil.disk_usage(directory).free < _RESERVE_BYTES


def disk_full(path: Path) -> MachineError:
    """The error of a disk that has no space for records."""
    return MachineError(f"no space is left for records in {path.parent}; free some, and tune again")


class ScratchDirectory:
    """A new directory in the system's temporary directory, held by a lock as long as this process lives.

    Making one removes those of processes that were killed: their locks are free. To be closed.
    """

    def __init__(self, prefix: str = "ansor_mlflow-build-") -> None:
        from filelock import FileLock  # what only loads a model does without

        _remove_abandoned(Path(tempfile.gettempdir()))
        hidden = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX))
        self.path = hidden.with_name(hidden.name.replace(_NEW_PREFIX, prefix))  # path of the directory
        self._lock = FileLock(hidden / _OWNER_LOCK)
        self._lock.acquire()
        hidden.rename(self.path)  # only now do others see it, and it is locked

    def require_space(self, errors: Iterable[str] = ()) -> None:
        """Checks that files can be written; a quota that is used up, or a lack of inodes, shows in errors alone."""
        if is_full(self.path) or any(sign in error for error in errors for sign in _DISK_FULL):
            raise MachineError(
                f"no space is left in the temporary directory {self.path.parent}; free some, or set TMPDIR to another"
            )

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


@contextmanager
def scratch_directory() -> Iterator[str]:
    """Path of an empty directory that is removed at the end; if this process is killed, by the next that makes one."""
    with contextlib.closing(ScratchDirectory("ansor_mlflow-scratch-")) as directory:
        inside = directory.path / "files"
        inside.mkdir()
        yield str(inside)


def _remove_abandoned(parent: Path) -> None:
    from filelock import FileLock, Timeout

    for directory in parent.glob("ansor_mlflow-*"):
        with contextlib.suppress(OSError, Timeout):
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            is_new = directory.name.startswith(_NEW_PREFIX)
            if is_new and time.time() - status.st_mtime < _YOUNG_S:
                continue
            if is_new or (directory / _OWNER_LOCK).exists():  # a new one's owner may have died before it had a lock
                with FileLock(directory / _OWNER_LOCK, timeout=0):
                    shutil.rmtree(directory, ignore_errors=True)
