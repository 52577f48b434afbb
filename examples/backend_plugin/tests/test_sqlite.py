"""Everything a backend must do, checked by the suite that this class inherits."""

import sqlite3

from kvoffload_sqlite import SqliteBackend, SqliteOptions

from kvoffload.testing import PersistentBackendSuite


class TestSqlite(PersistentBackendSuite):
    def open(self, namespace):
        return SqliteBackend(SqliteOptions(str(self.folder / "kv.db")), namespace)

    def open_small(self, namespace):
        return SqliteBackend(SqliteOptions(str(self.folder / "small.db"), 1 << 20), namespace)

    def damage(self, backend, key):
        """Turn the payload's last byte, as a bad disk would."""
        with sqlite3.connect(self.folder / "kv.db") as db:
            (payload,) = db.execute("SELECT payload FROM chunks WHERE key = ?", (key,)).fetchone()
            damaged = payload[:-1] + bytes([payload[-1] ^ 1])
            db.execute("UPDATE chunks SET payload = ? WHERE key = ?", (damaged, key))
        db.close()
