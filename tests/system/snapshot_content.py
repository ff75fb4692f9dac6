"""Programs that run inside a sandbox: one makes files of every kind, the other describes all files."""

MAKE = r"""
import os, shutil, socket, stat, struct
os.makedirs("/srv/s/d/e"); os.chdir("/srv/s")
def write(name, data=b"x", mode=0o644, owner=(0, 0)):
    with open(name, "wb") as file:
        file.write(data)
    os.chown(name, *owner)
    os.chmod(name, mode)
write("plain", b"hello" * 1000)
write("owned", owner=(1234, 4321))
write("high", owner=(65535, 65534))
write("setuid", mode=0o6755, owner=(33, 33))
write("closed", mode=0)
write("empty", b"")
write(b"new\nline", b"1")
write(b"\xff\xfe\x80", b"2")
write("n" * 255, b"3")
os.link("plain", "d/hard"); os.link("plain", "d/e/hard")
os.symlink("plain", "link"); os.symlink("/nowhere/\n", "dangling"); os.symlink("loop", "loop")
os.lchown("link", 7, 8)
os.mkfifo("fifo", 0o640); os.chown("fifo", 5, 6)
os.makedirs("sticky"); os.chmod("sticky", 0o1777); os.chown("sticky", 9, 10)
os.setxattr("plain", "user.color", b"blue"); os.setxattr("d", "user.dir", "gr\u00fcn".encode())
try:
    os.setxattr("owned", "system.posix_acl_access", struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry) for entry in
        ((1, 6, 0xFFFFFFFF), (2, 7, 777), (4, 4, 0xFFFFFFFF), (16, 7, 0xFFFFFFFF), (32, 4, 0xFFFFFFFF))))
except OSError as error:
    print("no access list:", error)
with open("sparse", "wb") as file:
    file.seek(8 << 20); file.write(b"middle" * 1000); file.truncate(64 << 20)
with open("holes", "wb") as file:
    file.truncate(32 << 20)
deep = b"/srv/s/" + b"/".join([b"deep" * 10] * 20)
os.makedirs(deep)
write(deep + b"/end")
os.utime("plain", ns=(10**18, 10**18 + 123456789)); os.utime("d", ns=(10**18, 987654321 * 10**9))
os.utime("empty", ns=(0, 1)); os.utime("link", ns=(1, 5 * 10**9), follow_symlinks=False)
listener = socket.socket(socket.AF_UNIX); listener.bind("socket")
# changes of the image's files
os.remove("/etc/debian_version"); shutil.rmtree("/usr/share/doc/apt")
shutil.rmtree("/usr/share/doc/bash"); os.mkdir("/usr/share/doc/bash"); write("/usr/share/doc/bash/mine")
os.remove("/etc/issue"); os.mkdir("/etc/issue"); write("/etc/issue/file")
shutil.rmtree("/etc/skel"); write("/etc/skel")
write("/etc/motd", b"changed"); os.chmod("/usr/share/doc/adduser", 0o700); os.chown("/etc/profile", 3, 3)
shutil.move("/usr/share/doc/base-files", "/srv/moved")
write("/tmp/kept", b"in tmp")
print("made")
"""

DESCRIBE = r"""
import hashlib, json, os, stat, sys
root, found, inodes = os.stat(b"/").st_dev, {}, {}
skipped = {b"/dev", b"/proc", b"/sys", b"/opt/opensandbox", b"/tmp/.sallyport", b"/srv/s/socket", b"/tmp/describe.json"}
KEPT = ("user.", "security.capability", "system.posix_acl")
def holes(path, size):
    fd, at, result = os.open(path, os.O_RDONLY), 0, []
    try:
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                start = size
            if start > at:
                result.append([at, start])
            at = start if start == size else os.lseek(fd, start, os.SEEK_HOLE)
    finally:
        os.close(fd)
    return result
def one(path):
    status = os.lstat(path)
    mode, item = status.st_mode, {}
    item["mode"], item["owner"] = oct(mode), [status.st_uid, status.st_gid]
    if status.st_dev != root or os.path.ismount(path):
        return None
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(KEPT)]
    item["xattrs"] = {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in names}
    if not stat.S_ISDIR(mode):
        item["mtime"] = status.st_mtime_ns
        if status.st_nlink > 1:
            item["same"] = inodes.setdefault(status.st_ino, os.fsdecode(path))
    elif path.startswith(b"/srv/s/"):
        item["mtime"] = status.st_mtime_ns
    if stat.S_ISLNK(mode):
        item["target"] = os.fsdecode(os.readlink(path))
    elif stat.S_ISREG(mode):
        item["size"] = status.st_size
        with open(path, "rb") as file:
            item["sha256"] = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else ""
        if path.startswith(b"/srv/"):
            item["holes"], item["blocks"] = holes(path, status.st_size), status.st_blocks
    return item
def walk(directory):
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if path in skipped:
            continue
        item = one(path)
        if item is None:
            continue
        found[os.fsdecode(path)] = item
        if stat.S_ISDIR(os.lstat(path).st_mode):
            walk(path)
walk(b"/")
json.dump(found, open("/tmp/describe.json", "w"))
print(len(found))
"""
