"""Everything a backend must do, checked in three lines."""

from kvoffload_sqlite import SqliteBackend, SqliteOptions

from kvoffload.testing import PersistentBackendSuite


class TestSqlite(PersistentBackendSuite):
    def open(self, namespace):
        return SqliteBackend(SqliteOptions(str(self.folder / "kv.db")), namespace)
