//! The control sockets of a vhost-user server: their requests, and how they change hands in a takeover.
//!
//! There is the takeover socket, beside the first socket of a disk, and the control socket of `--control`. Both answer alike.
//!
//! Invariant: a socket's file is the old server's until nothing of a takeover can fail any more.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use virtio_devices::vhost_user::StopToken;

use super::orders::Orders;
use super::roster::Roster;
use crate::control::{Control, HAND_OVER, Request};
use crate::exchange::{self, Desk, Listed, ServedDisk};
use crate::socket::{Socket, SocketError, is_file_of};
use crate::takeover::ControlSocket;

/// The server, as its control sockets see it.
pub(super) struct VhostUserDesk {
    pub(super) roster: Arc<Roster>,
    pub(super) orders: Orders,
    pub(super) stop: StopToken,
    pub(super) doors: Arc<Doors>,
}

impl Desk for VhostUserDesk {
    const SERVER: &'static str = "a vhost-user server";

    fn info(&self) -> Result<Value, String> {
        let state = if self.stop.is_stopped() {
            "stopping"
        } else {
            "serving"
        };
        let mut info = exchange::list(&self.disks()?);
        info["state"] = state.into();
        info["process"] = std::process::id().into();
        info["hand_over"] = HAND_OVER.into();
        Ok(info)
    }

    fn disks(&self) -> Result<Vec<Listed>, String> {
        let served = self.roster.served();
        let list = served.iter().map(|served| Listed {
            id: served.name.clone(),
            place: served.socket.path().display().to_string(),
            io: served.server.driver_name().to_owned(),
            disk: Arc::clone(&served.disk),
        });
        Ok(list.collect())
    }

    fn disk(&self, id: &str) -> Result<Arc<ServedDisk>, String> {
        Ok(Arc::clone(&self.roster.find(id)?.disk))
    }

    fn resize(&self, id: &str, size: u64, force: bool) -> Result<Value, String> {
        let failed = |error: String| format!("cannot resize disk {id} to {size} bytes: {error}");
        let served = self.roster.find(id)?;
        let _alone = served.disk.change(size, force).map_err(failed)?;
        let size = served.disk.grow_to(size).map_err(failed)?;
        match served.server.config_channel().notify() {
            Ok(true) => {}
            Ok(false) => tracing::info!(
                disk = id,
                "no client can be told of the new size; a guest sees it when it starts"
            ),
            Err(error) => {
                tracing::warn!(disk = id, %error, "the client was not told of the new size; its guest sees it when it starts again")
            }
        }
        Ok(json!({ "id": id, "size": size }))
    }

    fn special(&self, request: Request) -> Result<Value, String> {
        match request {
            Request::DiskAdd { disk, socket } => self.orders.ask(move |roster| roster.add(&disk, socket)),
            Request::DiskRemove { id } => self.orders.ask(move |roster| roster.remove(&id)),
            Request::Reload {} => self.orders.ask(|roster| roster.reload()),
            other => Err(exchange::refusal(Self::SERVER, &other)),
        }
    }

    fn hand_over(&self, connection: &UnixStream, request: Request) -> Result<(), String> {
        self.hand_disks_over(connection, request)
    }

    fn stop(&self) {
        tracing::info!(event = "stopping", "stopping, as the control socket was asked to");
        self.stop.stop();
    }
}

/// A control socket before it is served.
#[derive(Debug)]
pub(super) struct Door {
    socket: Socket,
    /// The socket's file, for the next server.
    file: OwnedFd,
    /// True if it is an old server's, which continues with it if the takeover fails.
    pub(super) is_adopted: bool,
}

impl Door {
    /// Creates the socket at `path`, or continues with the one of an old server that is there.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path.
    pub(super) fn take(path: &Path, offered: Option<ControlSocket>) -> Result<Self, SocketError> {
        let offered = offered.filter(|control| is_file_of(&control.file, path));
        let is_adopted = offered.is_some();
        let socket = match offered {
            Some(ControlSocket { listener, .. }) => Socket::adopt(listener, path, false)?,
            None => Socket::listen(path)?,
        };
        Ok(Self {
            file: socket.file()?,
            socket,
            is_adopted,
        })
    }

    /// Takes ownership of the socket's file.
    ///
    /// # Errors
    ///
    /// [`SocketError`] if it is gone.
    pub(super) fn keep(&self) -> Result<(), SocketError> {
        self.socket.keep()
    }

    pub(super) fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Serves requests, by threads as confined as the calling one.
    ///
    /// # Errors
    ///
    /// [`SocketError`], naming the path.
    pub(super) fn serve(self, desk: &Arc<VhostUserDesk>) -> Result<OpenDoor, SocketError> {
        Ok(OpenDoor {
            control: Control::serve_on(self.socket, &exchange::server(desk))?,
            file: self.file,
        })
    }
}

/// A control socket while it is served.
#[derive(Debug)]
pub(super) struct OpenDoor {
    control: Control,
    file: OwnedFd,
}

impl OpenDoor {
    /// Lets no client in until [`OpenDoor::resume`], and returns the socket for a new server.
    fn pause(&self) -> std::io::Result<ControlSocket> {
        self.control.pause();
        let socket = self.control.socket();
        Ok(ControlSocket {
            path: socket.absolute().to_owned(),
            listener: socket.listener().try_clone()?,
            file: self.file.try_clone()?,
        })
    }

    /// The takeover has failed: clients are let in again.
    fn resume(&self) {
        self.control.resume();
    }
}

/// The control sockets of a server while they are served.
#[derive(Debug, Default)]
pub(super) struct Doors {
    /// The takeover socket.
    pub(super) own: Mutex<Option<OpenDoor>>,
    /// The one of `--control`.
    pub(super) chosen: Mutex<Option<OpenDoor>>,
}

impl Doors {
    /// Closes the takeover socket, or the other one, until [`Doors::resume`], and returns it for a new server.
    pub(super) fn pause(door: &Mutex<Option<OpenDoor>>) -> Option<ControlSocket> {
        let offered = door.lock().as_ref().map(OpenDoor::pause).transpose();
        offered
            .inspect_err(|error| tracing::warn!(%error, "cannot pass a control socket to the new server"))
            .unwrap_or_default()
    }

    /// Lets clients in again.
    pub(super) fn resume(&self) {
        for door in [&self.own, &self.chosen] {
            door.lock().iter().for_each(OpenDoor::resume);
        }
    }

    /// Leaves a socket to a new server.
    pub(super) fn give_up(door: &Mutex<Option<OpenDoor>>) {
        if let Some(door) = door.lock().take() {
            door.control.give_up();
        }
    }

    /// Removes both.
    pub(super) fn close(&self) {
        drop((self.own.lock().take(), self.chosen.lock().take()));
    }

    /// Returns true if the takeover socket is at this path.
    pub(super) fn is_own_at(&self, path: &Path) -> bool {
        let own = self.own.lock();
        own.as_ref()
            .is_some_and(|door| door.control.socket().absolute() == path)
    }
}
